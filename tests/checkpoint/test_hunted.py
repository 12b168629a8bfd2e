"""What was once saved in part, restored as another number or marked elsewhere."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary


def save(tmp_path, **objects):
    manager = armillary.CheckpointManager(armillary.Checkpoint(**objects), tmp_path)
    manager.save(1)
    manager.sync()
    return manager


@pytest.mark.parametrize(
    "state",
    [
        optax.adam(0.1).init({"w": jnp.zeros(3)}),
        ({"w": jnp.zeros(3)}, jnp.int32(5)),
    ],
)
def test_a_tuple_is_not_saved_in_part(state):
    with pytest.raises(
        TypeError, match=r"`state` is of .* an array in a tuple.*'value"
    ):
        armillary.Checkpoint(state=state)


def test_a_tuple_of_modules_is_saved():
    modules = tuple(nnx.Linear(2, 2, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    assert len(armillary.Checkpoint(models=modules).read_leaves()) == 4


@pytest.mark.parametrize("number", [2**40, -3, 0.1, np.int64(2**40)])
def test_a_number_of_python_is_restored_as_it_was(tmp_path, number):
    variable = nnx.Variable(number)
    manager = save(tmp_path, variable=variable)
    variable.set_value(type(number)(0))
    manager.restore_or_initialize()
    restored = variable.get_value()
    assert (restored, type(restored)) == (number, type(number))


def test_keys_that_are_one_file_on_disk_are_refused(tmp_path):
    with pytest.raises(ValueError, match="name two arrays"):
        save(tmp_path, params={"a": jnp.ones(2), "a/": jnp.zeros(2)})


def test_the_best_is_what_the_manager_restored_before_the_evaluation(tmp_path):
    step, values = nnx.Variable(jnp.array(0)), {1: 0.9, 2: 0.1, 3: 0.5}
    checkpoint = armillary.Checkpoint(step={"value": step})
    manager = armillary.CheckpointManager(
        checkpoint,
        tmp_path,
        step_counter=step,
        keep_best="accuracy",
        higher_is_better=True,
    )
    for number in values:
        step[...] = jnp.array(number)
        manager.save()
    manager.sync()
    first, *_ = manager.checkpoints

    class Evaluator(armillary.AbstractEvaluator):
        def evaluate(self, num_steps):
            return {"accuracy": values[int(step[...])]}

    controller = armillary.Controller(
        global_step=step, evaluator=Evaluator(), checkpoint_manager=manager
    )
    for path in manager.checkpoints:
        manager.restore(path)
        controller.evaluate()
    assert manager.best_checkpoint == first


def test_an_interval_that_is_misspelt_names_auto(tmp_path):
    checkpoint = armillary.Checkpoint(params={"w": jnp.zeros(2)})
    with pytest.raises(ValueError, match='"auto"'):
        armillary.CheckpointManager(checkpoint, tmp_path, checkpoint_interval="Auto")
