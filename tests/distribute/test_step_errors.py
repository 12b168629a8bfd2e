"""Tests of the notes that Armillary adds to errors of JAX and Flax in a step."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    def __init__(self, step, **options):
        super().__init__(make_strategy(2), None, **options)
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
        (lambda _, batch: 2 * batch, TypeError, "`x, y = next(iterator)`"),
        (lambda _, batch: jnp.mean(batch), TypeError, "`x, y = next(iterator)`"),
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


@pytest.mark.parametrize(
    ("loss_fn", "lines"),
    [
        (lambda x: x, ["`loss.mean()`", "`armillary.compute_average_loss(loss)`"]),
        (lambda x: x[:, None] ** 2, ["`armillary.compute_average_loss(loss)`"]),
        (lambda x: (x.sum(), x), ["has_aux=True"]),
        (lambda x: None, ["`return loss`"]),
    ],
)
@pytest.mark.parametrize("grad", [jax.grad, nnx.value_and_grad])
def test_a_loss_that_is_not_one_number_is_answered(grad, loss_fn, lines):
    for strategy in (ONE, make_strategy(2)):
        notes = notes_of(Trainer(strategy, grad(loss_fn)))
        assert all(line in note for note in notes[:1] for line in lines)
        assert len(notes) == 1


class OfLightning(Trainer):
    def train_step(self, batch, batch_idx):  # pyright: ignore[reportIncompatibleMethodOverride]
        pass


class WithoutArguments(armillary.StandardEvaluator):
    def eval_step(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        pass


@pytest.mark.parametrize(
    ("run", "arguments"),
    [
        (lambda: OfLightning(ONE, None).train(1), r"train_step.*\(batch, batch_idx\)"),
        (lambda: WithoutArguments([jnp.ones(2)]).evaluate(1), r"eval_step.*`\(\)`"),
    ],
)
def test_a_step_with_other_arguments_is_answered_with_what_to_write(run, arguments):
    line = r".*iterator.*step\(self, iterator\):`.*`x, y = next\(iterator\)`"
    with pytest.raises(TypeError, match=arguments + line):
        run()


def unpack(trainer, iterator):
    x, y = iterator
    return x + y


def unpack_the_first(trainer, iterator):
    x, *others = iterator
    return x, others


def unpack_in_a_replica(trainer, iterator):
    trainer.strategy.run(functools.partial(unpack, trainer), args=(iterator,))


@pytest.mark.parametrize("compile_step", [True, False])
@pytest.mark.parametrize("step", [unpack, unpack_the_first, unpack_in_a_replica])
def test_unpacking_the_iterator_is_answered_with_what_to_write(step, compile_step):
    trainer = Mistaken(step, compile_step=compile_step)
    with pytest.raises(TypeError, match=r"iterator over .*`x, y = next\(iterator\)`"):
        trainer.train(1)


def test_a_step_may_iterate_over_some_batches():
    class Sums(Trainer):
        def train_step(self, iterator):
            for batch in itertools.islice(iterator, 2):
                self.total += batch["x"].sum()

    trainer = Sums(ONE, None)
    trainer.train(1)
    assert float(trainer.total) == 8.0


def test_other_errors_and_library_errors_get_no_such_note():
    def fail(x):
        raise TypeError("no")

    class Nested(Trainer):
        def train_step(self, iterator):
            next(iterator)
            self.strategy.run(lambda: self.strategy.run(lambda: None))

    assert notes_of(Trainer(ONE, fail, compile_step=False)) == []
    kind = armillary.errors.ReplicaContextError
    assert notes_of(Nested(make_strategy(2), None), kind) == []


@pytest.mark.parametrize("strategy", [ONE, make_strategy(1), make_strategy(2)])
def test_a_batch_that_is_a_tuple_needs_a_comma(strategy):
    def first(batch):
        return batch[0] + batch[1]

    batch = (jnp.ones(2), jnp.ones(2))
    with pytest.raises(TypeError, match=r"`args` is a tuple of 2 .*`first`.*the comma"):
        strategy.run(first, args=(batch))

    (found, *_) = strategy.local_results(strategy.run(first, args=(batch,)))
    np.testing.assert_array_equal(found, [2, 2])


def test_another_wrong_number_of_arguments_is_pythons_own_error():
    strategy = make_strategy(2)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        strategy.run(lambda x, y: x, args=(jnp.ones(2),))


def classify(labels):
    logits = jnp.ones((4, 3))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


@pytest.mark.parametrize(
    ("labels", "error"),
    [
        (lambda x: x, (AssertionError, TypeError)),
        (lambda x: jax.nn.one_hot(x.astype(int), 3), (AssertionError, TypeError)),
        (lambda x: x.astype(int)[:, None], ValueError),
    ],
    ids=["floats", "one-hot", "a column"],
)
def test_labels_of_another_kind_are_answered(labels, error):
    (note, *_) = notes_of(Trainer(ONE, lambda x: classify(labels(x))), error)
    assert "write `labels.astype(jnp.int32)`, and `labels[:, 0]`" in note
    assert "`optax.softmax_cross_entropy(logits, labels)`" in note


class Calls(Trainer):
    """Calls the count of an optimizer, as PyTorch's `optimizer.step()`."""

    def __init__(self, strategy):
        super().__init__(strategy, lambda x: self.optimizer.step())
        self.model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_count_of_an_optimizer_is_no_method(num_replicas):
    (note, *_) = notes_of(Calls(make_strategy(num_replicas)))
    assert "`optimizer.update(model, gradients)`" in note


def test_a_value_that_is_called_gets_no_such_answer():
    notes = notes_of(Trainer(ONE, lambda x: x()))
    assert not any("optimizer" in note for note in notes)


def test_the_layer_of_a_wrong_width_is_named():
    model = nnx.Sequential(
        nnx.Linear(1, 4, rngs=nnx.Rngs(0)), nnx.Linear(5, 2, rngs=nnx.Rngs(0))
    )
    trainer = Trainer(ONE, lambda x: trainer.model(x[:, None]))
    trainer.model = model
    notes = notes_of(trainer)
    assert (
        "It comes from `Linear(in_features=5, out_features=2)`, which got float32 "
        "(4, 4)." in notes
    )
