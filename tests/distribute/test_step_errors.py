"""Errors in a step come with what JAX and Flax cannot know."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from tests.problems import make_strategy


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy, use, data=None, **options):
        data = data or [{"x": np.ones(4, np.float32)}] * 2
        super().__init__(data, armillary.StandardTrainerOptions(**options))
        self.strategy, self.use = strategy, use
        self.total = jnp.zeros(())

    def train_step(self, iterator):
        def step_fn(batch):
            self.use(batch["x"])

        self.strategy.run(step_fn, args=(next(iterator),))


class Evaluator(armillary.StandardEvaluator):
    def __init__(self):
        super().__init__([{"x": np.ones(4, np.float32)}])

    def eval_step(self, iterator):
        return float(next(iterator)["x"].sum())


class Several(armillary.StandardTrainer):
    def __init__(self):
        data = {"b": [np.ones(3, np.int32)], "a": [{"y": np.ones((2, 1))}]}
        super().__init__(
            {key: lambda b=batches: iter(b) for key, batches in data.items()}
        )

    def train_step(self, iterator):
        next(iterator["a"])["z"]


def notes_of(trainer, kind=TypeError):
    with pytest.raises(kind) as caught:
        trainer.train(1)
    return getattr(caught.value, "__notes__", [])


def add_three(x):
    return x + jnp.ones(3)


ONE = armillary.distribute.DefaultStrategy()
MANY = [{f"x{i:02}": np.ones(1) for i in range(30)}]


@pytest.mark.parametrize(
    ("make", "kind", "end"),
    [
        (lambda: Trainer(ONE, add_three), TypeError, " with: x: float32 (4,)."),
        (
            lambda: Trainer(make_strategy(2), add_three),
            TypeError,
            " with on each replica: x: float32 (2,).",
        ),
        (Several, KeyError, " with: 0/y: float32 (2, 1), 1: int32 (3,)."),
        (lambda: Trainer(ONE, None, MANY), KeyError, "x19: float32 (1,), and 10 more."),
    ],
)
def test_an_error_comes_with_the_shapes_of_the_batch(make, kind, end):
    (note,) = [note for note in notes_of(make(), kind) if note.startswith("The batch")]
    assert note.startswith("The batch that `train_step` was traced")
    assert note.endswith(end)


def branch(x):
    return x if x.sum() > 0 else -x


USES = [
    (branch, jax.errors.TracerBoolConversionError),
    (lambda x: float(x.sum()), jax.errors.ConcretizationTypeError),
    (lambda x: x.sum().item(), jax.errors.ConcretizationTypeError),
    (np.log, jax.errors.TracerArrayConversionError),
    (lambda x: [1, 2][x.argmax()], jax.errors.TracerIntegerConversionError),
    (lambda x: x[x > 0], jax.errors.NonConcreteBooleanIndexError),
]
START = (
    "`{}` uses the value of an array in Python, but in a compiled step, and on several"
)


@pytest.mark.parametrize(("use", "kind"), USES)
def test_a_step_that_needs_a_value_is_led_to_what_needs_none(use, kind):
    (note,) = notes_of(Trainer(make_strategy(2), use), kind)
    assert note.startswith(START.format("train_step"))
    assert "`jnp.where` or `jax.lax.cond`" in note and "`train_loop_end`" in note
    assert "`compile_step=False` in its options" in note
    Trainer(ONE, use, compile_step=False).train(2)  # There it has values.


def test_evaluators_and_functions_are_led_to_their_results():
    @armillary.function
    def double(x):
        return 2 * float(x)

    with pytest.raises(jax.errors.ConcretizationTypeError) as of_evaluator:
        Evaluator().evaluate(1)
    with pytest.raises(jax.errors.ConcretizationTypeError) as of_function:
        double(jnp.ones(()))
    (first,), (second,) = of_evaluator.value.__notes__, of_function.value.__notes__
    assert first.startswith(START.format("eval_step"))
    assert "return it from `eval_step`" in first
    assert second.startswith(START.format("double"))
    assert "return it, and read it after the call." in second


class Model(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(()))


class Mistaken(Trainer):
    def __init__(self, step):
        super().__init__(make_strategy(2), None)
        self.model, self.step = Model(), step

    def train_step(self, iterator):
        self.step(self, iterator)


def compile_a_closure(trainer, iterator):
    @nnx.jit
    def double():
        trainer.model.weight[...] *= 2

    trainer.strategy.run(double)


@pytest.mark.parametrize(
    ("step", "kind", "line"),
    [
        (lambda _, batch: batch["x"], TypeError, "`batch = next(iterator)`"),
        (lambda _, batch: batch.x, AttributeError, "`batch = next(iterator)`"),
        (lambda _, it: next(it)["x"].mean(), AttributeError, "run(replica_fn"),
        (lambda _, it: next(it)["x"] * 2, TypeError, "run(replica_fn"),
        (lambda _, it: jnp.sum(next(it)["x"]), TypeError, "run(replica_fn"),
        (lambda _, it: jax.lax.psum(next(it), "replica"), NameError, "The axis of"),
        (compile_a_closure, Exception, "nnx.jit(fn)(self.model, batch)"),
    ],
)
def test_a_mistake_is_answered_with_what_to_write(step, kind, line):
    notes = notes_of(Mistaken(step), kind)
    assert len(notes) == 1 and line in notes[0], notes


def test_other_errors_and_those_of_the_library_get_no_such_note():
    def fail(x):
        raise TypeError("no")

    class Nested(Trainer):
        def train_step(self, iterator):
            next(iterator)
            self.strategy.run(lambda: self.strategy.run(lambda: None))

    assert notes_of(Trainer(ONE, fail, compile_step=False)) == []
    kind = armillary.errors.ReplicaContextError
    assert notes_of(Nested(make_strategy(2), None), kind) == []
