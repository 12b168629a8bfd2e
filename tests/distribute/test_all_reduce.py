"""Tests of `all_reduce` under every strategy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.data import from_arrays
from armillary.distribute import ReduceOp
from armillary.errors import (
    DoubleReductionError,
    ReplicaContextError,
    ReplicaMismatchError,
)
from tests.mistakes import mistakes
from tests.tiers import slow_after_first

X = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
DATA = {"x": X, "y": X @ np.array([1, -2, 3], np.float32)}
STRATEGIES = {
    "default": armillary.distribute.DefaultStrategy,
    "one device": lambda: armillary.OneDeviceStrategy("cpu:1"),
    "sharded": lambda: armillary.ShardedStrategy(devices=jax.devices()[:4]),
    "one replica": lambda: armillary.MirroredStrategy(["cpu:0"]),
    "four replicas": lambda: armillary.MirroredStrategy(jax.devices()[:4]),
    "central": lambda: armillary.distribute.CentralStorageStrategy(jax.devices()[:2]),
}
REDUCTIONS = {
    "all_reduce": lambda grads: armillary.all_reduce("mean", grads),
    "context": lambda grads: armillary.get_replica_context().all_reduce("mean", grads),
    "pmean": lambda grads: jax.lax.pmean(grads, "replica"),
    "psum": lambda grads: jax.tree.map(
        lambda g: g / jax.lax.axis_size("replica"), jax.lax.psum(grads, "replica")
    ),
}


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy, reduce, *, transform=None, **options):
        source = from_arrays(DATA, batch_size=8, repeat=True)
        super().__init__(
            strategy.distribute_dataset(source),
            armillary.StandardTrainerOptions(**options),
        )
        self.strategy, self.reduce = strategy, reduce
        self.model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        transform = transform or optax.adam(0.1)
        self.optimizer = nnx.Optimizer(self.model, transform, wrt=nnx.Param)

    def train_step(self, iterator):
        self.strategy.run(self.replica_step, args=(next(iterator),))

    def replica_step(self, batch):
        def loss_fn(model):
            losses = (model(batch["x"])[:, 0] - batch["y"]) ** 2
            return jnp.mean(losses) + 1e-2 * jnp.sum(model.kernel[...] ** 2)

        self.optimizer.update(self.model, self.reduce(nnx.grad(loss_fn)(self.model)))


def train(*args, num_steps=4, **options):
    trainer = Trainer(*args, **options)
    trainer.train(num_steps)
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(trainer.model)])


@pytest.fixture(scope="module")
def expected():
    return train(armillary.distribute.DefaultStrategy(), lambda grads: grads)


@slow_after_first("reduction", REDUCTIONS)
@slow_after_first("strategy", STRATEGIES)
def test_one_text_of_a_step_runs_under_every_strategy(strategy, reduction, expected):
    found = train(STRATEGIES[strategy](), REDUCTIONS[reduction])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one device", "sharded", "four replicas"])
@pytest.mark.parametrize("reduction", ["all_reduce", "pmean"])
def test_an_eager_step_reduces_as_well(strategy, reduction, expected):
    found = train(STRATEGIES[strategy](), REDUCTIONS[reduction], compile_step=False)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_an_eager_step_that_leaves_replicas_different_is_refused():
    with pytest.raises(
        ReplicaMismatchError,
        match=r"(?s)model/bias \(plain, mirrored\), written at .*armillary.all_red",
    ):
        train(
            STRATEGIES["four replicas"](),
            lambda grads: grads,
            compile_step=False,
            num_steps=1,
        )


@pytest.fixture
def rows(strategy, put_rows):
    return put_rows(strategy, [[1.0, 8.0], [2.0, 7.0], [3.0, 6.0], [4.0, 5.0]])


@pytest.mark.parametrize("op", [*ReduceOp, "sum", "MEAN"])
def test_each_operation_gives_every_replica_the_same(op, strategy, rows):
    combine = {"SUM": np.sum, "MEAN": np.mean, "MAX": np.max, "MIN": np.min}
    name = getattr(op, "value", str(op).upper())
    found = strategy.run(lambda x: armillary.all_reduce(op, {"x": x}), args=(rows,))
    assert found["x"].is_shared
    np.testing.assert_allclose(found["x"].array, combine[name](rows.array, 0))


def test_a_mean_of_half_precision_is_not_too_large_on_the_way(strategy):
    half = jnp.full(2, 30_000, jnp.float16)
    found = strategy.run(lambda: armillary.all_reduce("mean", half)).array
    assert found.dtype == jnp.float16
    np.testing.assert_array_equal(found, half)


@pytest.mark.slow
@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("dtype", [bool, "int8", "int32", "float16", "float32"])
def test_the_type_of_a_result_is_the_same_on_one_and_on_many(make, op, dtype):
    def step_fn():
        return armillary.all_reduce(op, jnp.ones((), dtype))

    def type_under(strategy):
        return jax.tree.leaves(strategy.run(step_fn))[0].dtype

    assert type_under(make()) == type_under(STRATEGIES["four replicas"]())


@pytest.mark.parametrize("sign", [1, -1])
def test_infinities_of_replicas_with_data_are_what_they_are(sign):
    strategy = STRATEGIES["four replicas"]()
    options = armillary.data.InputOptions(remainder="exact")
    data = from_arrays(np.ones(2, np.float32), batch_size=2)
    op, expected = ("max", -np.inf) if sign > 0 else ("min", np.inf)

    def step_fn(x):
        return armillary.all_reduce(op, jnp.where(x > 2, x, expected).max())

    for batch in strategy.distribute_dataset(data, options):
        found = strategy.run(step_fn, args=(batch,))
        assert strategy.local_results(found)[0] == expected


def find_rounds(strategy, reduce):
    """Returns the lines of the all-reduces that a compiled step makes."""

    def step_fn(x):
        return jax.tree.leaves(reduce({"a": x, "b": x[0]}))

    rows = strategy.distribute_values_from_function(lambda context: jnp.ones(2))
    step = jax.jit(lambda rows: strategy.run(step_fn, (rows,)))
    lines = step.lower(rows).compile().as_text().splitlines()
    return [line for line in lines if re.search(r" all-reduce(-start)?\(", line)]


def test_a_tree_travels_in_one_round(strategy):
    (round_,) = find_rounds(strategy, lambda tree: armillary.all_reduce("sum", tree))
    assert "f32[2]" in round_ and "f32[]" in round_


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.float16])
def test_values_travel_in_another_dtype(op, dtype, strategy, rows):
    def reduce(x):
        return armillary.all_reduce(op, {"x": x, "n": jnp.ones((), int)}, dtype=dtype)

    program = str(jax.make_jaxpr(lambda x: strategy.run(reduce, (x,)))(rows))
    short = {"bfloat16": "bf16", "float16": "f16"}[jnp.dtype(dtype).name]
    assert re.search(rf":{short}\[2\] = p(sum|max)\[", program)
    found = strategy.run(reduce, args=(rows,))
    combine = {"sum": np.sum, "mean": np.mean, "max": np.max}[op]
    assert found["x"].array.dtype == jnp.float32
    np.testing.assert_allclose(found["x"].array, combine(rows.array, 0))
    # Only floats travel in another dtype.
    expected = strategy.run(lambda: armillary.all_reduce(op, jnp.ones((), int)))
    assert found["n"].array.dtype == expected.array.dtype


def test_values_do_not_travel_as_integers(strategy, rows):
    with pytest.raises(ValueError, match="`dtype` is 'int8', but values travel"):
        strategy.run(lambda x: armillary.all_reduce("sum", x, dtype="int8"), (rows,))


def test_one_replica_sends_nothing_in_another_dtype():
    value = jnp.asarray(1.001)
    strategy = STRATEGIES["one replica"]()
    found = strategy.run(lambda: armillary.all_reduce("sum", value, dtype="bfloat16"))
    assert found == value


def test_reducing_twice_is_an_error_in_another_dtype(strategy, rows):
    def step_fn(x):
        half = armillary.all_reduce("sum", x, dtype="bfloat16")
        return armillary.all_reduce("sum", half, dtype="bfloat16")

    def divided(x):
        loss = armillary.compute_average_loss(x)
        return armillary.all_reduce("mean", loss, dtype="bfloat16")

    for fn in (step_fn, divided):
        with pytest.raises(DoubleReductionError, match="over replicas at"):
            strategy.run(fn, args=(rows,))


@mistakes(
    {
        ValueError: {
            **{
                f"`dtype` is .*{dtype}.*, but values travel .* in a dtype of floats": (
                    lambda dtype=dtype: armillary.all_reduce_gradients(dtype=dtype)
                )
                for dtype in ("int8", "bool", "text", "complex64", 3)
            },
            "before the values: `armillary.all_reduce": (
                lambda: armillary.all_reduce(jnp.ones(2), "mean")
            ),
            "`op` is 'max', .* the \"mean\" or the": (
                lambda: armillary.over_replicas(jnp.sum, "max")
            ),
        },
        ReplicaContextError: {
            f"`{name}` was called outside `Strategy.run`": call
            for name, call in {
                "armillary.all_reduce": lambda: armillary.all_reduce("sum", 1.0),
                "weighted_mean": lambda: armillary.weighted_mean(jnp.ones(2), 1.0),
                "over_replicas": lambda: armillary.over_replicas(jnp.sum)(1.0),
                "compute_average_loss": (
                    lambda: armillary.compute_average_loss(jnp.ones(2))
                ),
                "scale_regularization_loss": (
                    lambda: armillary.scale_regularization_loss(1.0)
                ),
            }.items()
        },
    }
)
def test_arguments_that_cannot_be_right_are_errors(call, error, message, strategy):
    with strategy.scope(), pytest.raises(error, match=message):
        call()


def test_results_of_run_are_reduced_by_the_strategy(strategy, rows):
    values = strategy.run(lambda x: x, args=(rows,))
    with pytest.raises(
        ReplicaContextError, match=r"use `strategy.reduce\(op, value\)`"
    ):
        armillary.all_reduce("mean", values)


def test_the_error_says_the_line_to_write_for_the_loss_at_hand(strategy):
    def step_fn(x, weight, scale):
        def loss_fn(w):
            losses = (x * w) ** 2
            if scale == "mean":
                return jnp.mean(losses)
            return armillary.compute_average_loss(losses)

        weight[...] = weight[...] - jax.grad(loss_fn)(weight[...])

    rows = strategy.distribute_values_from_function(lambda context: jnp.ones(2))
    for scale in ("mean", "sum"):
        with pytest.raises(ReplicaMismatchError) as caught:
            strategy.run(step_fn, args=(rows, nnx.Param(jnp.ones(2)), scale))
        message = str(caught.value)
        assert "(plain, mirrored), written at" in message
        assert f'gradients = armillary.all_reduce("{scale}", gradients)' in message
        assert "through the gradient of a loss of one replica (at " in message


def test_a_learning_rate_is_no_mean(strategy, rows):
    """A sum of gradients times 1/4, on 4 replicas, is not taken for a mean."""

    def step_fn(x):
        grads = jax.grad(lambda w: armillary.compute_average_loss(x * w))(jnp.ones(2))
        return 0.25 * jax.lax.psum(grads, "replica"), jax.lax.psum(grads, "replica") / 4

    found = strategy.run(step_fn, args=(rows,))
    np.testing.assert_allclose(found[0].array, found[1].array)


def test_a_mean_is_seen_in_the_words_of_jax(strategy, rows):
    def step_fn(x):
        grads = jax.grad(lambda w: armillary.compute_average_loss(x * w))(jnp.ones(2))
        return jax.jit(lambda tree: jax.lax.pmean(tree, "replica"))(grads)

    with pytest.raises(DoubleReductionError, match="would be 4 times too small"):
        strategy.run(step_fn, args=(rows,))
