"""Errors in a step come with what JAX, Flax and Optax cannot know."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from tests.problems import make_strategy


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy, use, **options):
        data = [{"x": np.ones(4, np.float32)}] * 2
        super().__init__(data, armillary.StandardTrainerOptions(**options))
        self.strategy, self.use = strategy, use
        self.total = jnp.zeros(())

    def train_step(self, iterator):
        def step_fn(batch):
            self.use(batch["x"])

        self.strategy.run(step_fn, args=(next(iterator),))


def find_note(error, start):
    return next(note for note in error.__notes__ if note.startswith(start))


@pytest.mark.parametrize(
    ("num_replicas", "expected"),
    [
        (1, "`train_step` was traced with on each replica: x: float32 (4,)."),
        (2, "`train_step` was traced with on each replica: x: float32 (2,)."),
        (None, "`train_step` was traced with: x: float32 (4,)."),
    ],
)
def test_an_error_comes_with_the_shapes_of_the_batch(num_replicas, expected):
    strategy = armillary.DefaultStrategy()
    if num_replicas is not None:
        strategy = make_strategy(num_replicas)

    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        Trainer(strategy, lambda x: x + jnp.ones(3)).train(1)
    assert find_note(caught.value, "The batch that") == "The batch that " + expected


def test_the_arrays_of_several_datasets_are_numbered():
    class Several(armillary.StandardTrainer):
        def __init__(self):
            data = {"b": [np.ones(3, np.int32)], "a": [{"y": np.ones((2, 1))}]}
            super().__init__(
                {
                    name: lambda batches=batches: iter(batches)
                    for name, batches in data.items()
                }
            )

        def train_step(self, iterator):
            next(iterator["a"])["z"]

    with pytest.raises(KeyError, match="z") as caught:
        Several().train(1)
    assert find_note(caught.value, "The batch") == (
        "The batch that `train_step` was traced with: 0/y: float32 (2, 1), 1: int32 "
        "(3,)."
    )


def test_a_batch_of_many_arrays_is_cut_short():
    class Many(Trainer):
        def __init__(self):
            super().__init__(armillary.DefaultStrategy(), None)
            self.train_dataset = [{f"x{i:02}": np.ones(1) for i in range(30)}]

    with pytest.raises(KeyError, match="x") as caught:
        Many().train(1)
    note = find_note(caught.value, "The batch that")
    assert note.endswith("x19: float32 (1,), and 10 more.")


def test_what_the_library_raises_gets_no_note():
    class Outside(Trainer):
        def train_step(self, iterator):
            next(iterator)
            self.strategy.run(lambda: self.strategy.run(lambda: None))

    strategy = make_strategy(2)
    with pytest.raises(armillary.errors.ReplicaContextError) as caught:
        Outside(strategy, None).train(1)
    assert not hasattr(caught.value, "__notes__")


# The value of an array


class Evaluator(armillary.StandardEvaluator):
    def __init__(self):
        super().__init__([{"x": np.ones(4, np.float32)}])

    def eval_step(self, iterator):
        return float(next(iterator)["x"].sum())


def branch(x):
    if x.sum() > 0:
        return x
    return -x


USES = [
    (branch, jax.errors.TracerBoolConversionError),
    (lambda x: float(x.sum()), jax.errors.ConcretizationTypeError),
    (lambda x: x.sum().item(), jax.errors.ConcretizationTypeError),
    (np.log, jax.errors.TracerArrayConversionError),
    (lambda x: [1, 2][x.argmax()], jax.errors.TracerIntegerConversionError),
    (lambda x: x[x > 0], jax.errors.NonConcreteBooleanIndexError),
]
START = (
    "`{}` uses the value of an array in Python, but in a compiled step, and on several "
    "replicas, an array has no value for Python. To choose by it, use `jnp.where` or "
    "`jax.lax.cond`; to print it, use `jax.debug.print`; to read it, "
)
TRAINER_NOTE = START.format("train_step") + (
    "hold it in an array of the trainer, made in the constructor, and return that from "
    "`train_loop_end`. On one device, `StandardTrainerOptions(compile_step=False)` "
    "runs the step line by line."
)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(("use", "kind"), USES)
def test_a_step_that_needs_a_value_is_led_to_what_needs_none(use, kind, num_replicas):
    trainer = Trainer(make_strategy(num_replicas), use)

    with pytest.raises(kind) as caught:
        trainer.train(1)
    assert TRAINER_NOTE in caught.value.__notes__


def test_so_is_a_step_that_is_not_compiled_on_several_replicas():
    trainer = Trainer(make_strategy(2), branch, compile_step=False)

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        trainer.train(1)
    assert TRAINER_NOTE in caught.value.__notes__


@pytest.mark.parametrize("use", [use for use, _ in USES])
def test_a_step_that_is_not_compiled_has_values_on_one_device(use):
    Trainer(armillary.DefaultStrategy(), use, compile_step=False).train(2)


def test_the_note_of_an_evaluator_speaks_of_its_methods():
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        Evaluator().evaluate(1)
    assert START.format("eval_step") + (
        "return it from `eval_step`, for `eval_reduce`. On one device, "
        "`StandardEvaluatorOptions(compile_step=False)` runs the step line by line."
    ) in (caught.value.__notes__)


def test_the_note_of_a_function_speaks_of_its_result():
    @armillary.function
    def double(x):
        return 2 * float(x)

    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        double(jnp.ones(()))
    note = START.format("double") + "return it, and read it after the call."
    assert note in caught.value.__notes__


def test_other_errors_get_no_such_note():
    def fail(x):
        raise TypeError("no")

    with pytest.raises(TypeError, match="no") as caught:
        Trainer(armillary.DefaultStrategy(), fail, compile_step=False).train(1)
    assert not hasattr(caught.value, "__notes__")
