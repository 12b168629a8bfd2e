"""Tests of Keras variables as the state of a step."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary.errors import CapturedStateError, StateStructureError
from armillary.state._lift import State, find_slots
from armillary.state._slots import Role


class Holder:
    """Holds what a step reaches."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


def _save(checkpoint, folder):
    manager = armillary.CheckpointManager(checkpoint, folder)
    path = manager.save(1)
    manager.sync()
    return path


def make_model(keras):
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(3),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(2),
        ]
    )


def test_paths_are_names_of_attributes_and_roles_follow_keras(keras):
    model = make_model(keras)
    found = {slot.path: slot.role for slot in find_slots(model, "model")}
    assert found == {
        "model/layers/1/bias": Role.PLAIN,
        "model/layers/1/kernel": Role.PLAIN,
        "model/layers/2/beta": Role.PLAIN,
        "model/layers/2/gamma": Role.PLAIN,
        "model/layers/2/moving_mean": Role.BATCH_STATISTIC,
        "model/layers/2/moving_variance": Role.BATCH_STATISTIC,
        "model/layers/3/seed_generator/state": Role.RANDOM_KEY,
        "model/layers/4/bias": Role.PLAIN,
        "model/layers/4/kernel": Role.PLAIN,
    }


@pytest.mark.slow
def test_functional_and_subclassed_models_have_all_their_variables(keras):
    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = [keras.layers.Dense(3), keras.layers.Dense(3)]
            self.scale = self.add_weight(shape=(), name="scale")

        def call(self, x):
            return self.inner[1](self.inner[0](x)) * self.scale

    inputs = keras.Input((4,))
    shared = keras.layers.Dense(4)
    functional = keras.Model(inputs, shared(shared(inputs)))
    subclassed = Twice()
    subclassed(np.ones((1, 4)))
    for model in (functional, subclassed):
        slots = find_slots(model, "model")
        assert {slot.key for slot in slots} == set(map(id, model.variables))
    assert "model/inner/0/kernel" in {slot.path for slot in slots}


def test_an_optimizer_holds_its_own_variables_only(keras):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    roles = {slot.path: slot.role for slot in find_slots(optimizer, "optimizer")}
    assert roles.pop("optimizer/iterations") is Role.FIRST_REPLICA
    assert roles.pop("optimizer/learning_rate") is Role.FIRST_REPLICA
    assert roles == {
        f"optimizer/{name}/{i}": Role.PLAIN
        for name in ("momentums", "velocities")
        for i in (0, 1)
    }


@pytest.mark.slow
def test_a_step_changes_the_variables_that_the_user_holds(keras, run_lifted):
    model = make_model(keras)
    kernel = model.layers[0].kernel
    holder = Holder(model=model)

    def step():
        holder.model(jnp.ones((2, 4)), training=True)
        kernel.assign_add(jnp.ones((4, 3)))

    before, mean = np.array(kernel.value), np.array(model.layers[1].moving_mean.value)
    seed = np.array(model.layers[2].seed_generator.state.value)
    run_lifted(step, holder)
    assert model.layers[0].kernel is kernel
    assert isinstance(kernel.value, jax.Array)
    np.testing.assert_allclose(np.array(kernel.value), before + 1)
    assert not np.array_equal(np.array(model.layers[1].moving_mean.value), mean)
    assert np.array(model.layers[2].seed_generator.state.value)[1] == seed[1] + 1


def test_a_step_that_fails_leaves_variables_as_they_were(keras, run_lifted):
    model = make_model(keras)
    before = [np.array(variable.value) for variable in model.variables]
    holder = Holder(model=model)

    def step():
        holder.model(jnp.ones((2, 4)), training=True)
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        run_lifted(step, holder)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(np.array(variable.value), value)


def test_a_change_of_what_is_trained_is_noticed(keras):
    model = make_model(keras)
    old = State([(model, "model")])
    assert old.is_current()
    model.layers[0].trainable = False
    assert not old.is_current()
    assert "model/layers/1/trainable" in State([(model, "model")]).changes_since(old)


def test_a_variable_that_is_read_out_of_reach_is_named(keras, run_lifted):
    scale = keras.Variable(2.0)
    holder = Holder(total=jnp.zeros(()))

    def step():
        holder.total = holder.total + scale.value

    with pytest.raises(CapturedStateError, match=r"`step` reads 1 variable") as caught:
        run_lifted(step, holder)
    assert "scale (keras." in str(caught.value)


def test_a_variable_that_is_written_out_of_reach_is_named_and_kept(keras, run_lifted):
    count = keras.Variable(2.0)
    holder = Holder(total=jnp.zeros(()))

    def step():
        count.assign(holder.total + 1)

    with pytest.raises(CapturedStateError, match=r"`step` writes 1 variable"):
        run_lifted(step, holder)
    assert float(count.value) == 2.0


def test_variables_that_a_step_makes_are_an_error_with_the_fix(keras, run_lifted):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    holder = Holder(model=model, optimizer=keras.optimizers.SGD(0.1, momentum=0.9))

    def step():
        variables = holder.model.trainable_variables
        holder.optimizer.apply([v.value for v in variables], variables)

    def make():
        keras.metrics.Mean().update_state(1.0)

    with pytest.raises(StateStructureError, match=r"`step` makes the Keras variable"):
        run_lifted(step, holder)
    message = r"`make` makes .*Make layers, metrics and optimizers outside of the step"
    with pytest.raises(StateStructureError, match=message):
        run_lifted(make, holder)
    holder.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    holder.optimizer.build(model.trainable_variables)
    run_lifted(step, holder)
    assert int(holder.optimizer.iterations.value) == 1


@pytest.mark.slow
def test_a_checkpoint_of_keras_objects_is_restored_into_new_ones(keras, tmp_path):
    def make():
        model = make_model(keras)
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        return model, optimizer

    model, optimizer = make()
    optimizer.apply(model.trainable_variables)
    checkpoint = armillary.Checkpoint(model=model, optimizer=optimizer)
    path = _save(checkpoint, tmp_path)
    others = make()
    checkpoint = armillary.Checkpoint(model=others[0], optimizer=others[1])
    armillary.CheckpointManager(checkpoint, tmp_path).restore(path)
    for ours, theirs in zip((model, optimizer), others, strict=True):
        for a, b in zip(ours.variables, theirs.variables, strict=True):
            np.testing.assert_array_equal(np.array(a.value), np.array(b.value))


@pytest.mark.slow
def test_a_program_without_keras_never_loads_it():
    code = (
        "import sys, jax.numpy as jnp, armillary\n"
        "class Holder: pass\n"
        "holder = Holder(); holder.total = jnp.zeros(())\n"
        "@armillary.function\n"
        "def step(holder): holder.total = holder.total + 1\n"
        "step(holder)\n"
        "print(holder.total, 'keras' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "1.0 False\n"
