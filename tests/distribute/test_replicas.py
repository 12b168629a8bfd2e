"""Errors that JAX's types for per-replica values make possible."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary import ReduceOp, get_replica_context
from armillary.errors import DoubleReductionError, ReplicaMismatchError
from tests.problems import Holder

ADVICE = (
    "gradients with respect to mirrored parameters arrive already summed over "
    "replicas, so reducing them again makes them too large by the number of replicas."
)


@pytest.fixture
def strategy(make_mirrored):
    return make_mirrored(2)


@pytest.fixture
def batch(strategy, put_rows):
    return put_rows(strategy, [[1, 2], [3, 4]])


def test_mirrored_slots_that_differ_are_all_named(strategy, batch):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    root = Holder(average={"total": jnp.zeros(2)}, count=jnp.zeros(()))
    before = model.bias[...]

    def step_fn(x):
        model.bias[...] = model.bias[...] + x[0]
        root.average = {"total": root.average["total"] + x}
        root.count = root.count + 1

    with pytest.raises(ReplicaMismatchError) as caught:
        strategy.run(step_fn, args=(batch,))
    message = re.sub(r"at /\S*/", "at ", str(caught.value))
    assert re.sub(r":\d+", "", message) == (
        "2 of 4 slots are mirrored, so they must be equal on all replicas, but "
        "`strategy.run` left values in them that differ:\n"
        "  model/bias (plain, mirrored), written at test_replicas.py (step_fn)\n"
        "  root/average/total (plain, mirrored), written at test_replicas.py "
        "(step_fn)\n"
        "They were computed from one replica's share of the batch. Reduce first "
        '(`armillary.all_reduce("mean", value)`), or make '
        "the variable with `aggregation=armillary.VariableAggregation.MEAN`, `SUM` or "
        "`ONLY_FIRST_REPLICA`."
    )
    assert model.bias[...] is before


def test_reducing_first_is_the_fix(strategy, batch):
    total = nnx.Variable(jnp.zeros(2))

    def step_fn(x):
        total[...] = total[...] + get_replica_context().all_reduce(ReduceOp.MEAN, x)

    strategy.run(step_fn, args=(batch,))
    np.testing.assert_array_equal(total[...], [2, 3])


def test_a_slot_that_is_set_to_a_constant_is_equal_everywhere(strategy, batch):
    total = nnx.Variable(jnp.ones(2))

    def step_fn(x):
        total[...] = total[...] * 0 + 7
        return x

    strategy.run(step_fn, args=(batch,))
    np.testing.assert_array_equal(total[...], [7, 7])


def gradient(model: nnx.Module, x: jax.Array) -> Any:
    return armillary.all_reduce(
        "sum", nnx.grad(lambda model: jnp.sum(model(x[None])))(model)
    )


DOUBLE = {
    "psum": lambda grads: jax.lax.psum(grads, "replica"),
    "all_reduce": lambda grads: armillary.all_reduce("sum", grads),
    "context": lambda grads: get_replica_context().all_reduce(ReduceOp.SUM, grads),
    "scaled psum": lambda grads: jax.lax.psum(
        jax.tree.map(lambda g: g * 3, grads), "replica"
    ),
    "psum inside jit": lambda grads: jax.jit(lambda g: jax.lax.psum(g, "replica"))(
        grads
    ),
    "psum inside scan": lambda grads: jax.lax.scan(
        lambda c, _: (c, jax.lax.psum(grads, "replica")), 0, length=2
    )[1],
    "sum of what a branch gives": lambda grads: armillary.all_reduce(
        "sum", jax.lax.cond(True, lambda g: g, lambda g: g, grads)
    ),
}


@pytest.mark.parametrize("reduce_fn", DOUBLE.values(), ids=DOUBLE)
def test_a_gradient_that_is_summed_again_is_an_error(strategy, batch, reduce_fn):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def step_fn(x):
        return reduce_fn(armillary.all_reduce("mean", gradient(model, x)))

    line = step_fn.__code__.co_firstlineno + 1
    with pytest.raises(DoubleReductionError) as caught:
        strategy.run(step_fn, args=(batch,))
    message = str(caught.value)
    assert re.match(r"The sum over replicas at \S*test_replicas\.py:\d+", message)
    assert re.search(rf"it was reduced at \S*test_replicas\.py:{line} ", message)
    assert "would be 2 times too large. Use the value as it is" in message


def test_the_error_is_that_of_the_run_in_a_compiled_function(strategy, batch):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def step_fn(x):
        return jax.lax.psum(jax.lax.pmean(gradient(model, x), "replica"), "replica")

    @armillary.function
    def step(x):
        return strategy.run(step_fn, args=(x,))

    with pytest.raises(DoubleReductionError, match="The sum over replicas at"):
        step(batch)


def test_a_mean_of_what_was_reduced_changes_nothing(strategy, batch):
    def step_fn(x):
        total = armillary.all_reduce("sum", x)
        return total, armillary.all_reduce("mean", total)

    total, mean = strategy.run(step_fn, args=(batch,))
    np.testing.assert_array_equal(total.array, mean.array)


MEANT = {
    "pmean of a batch statistic": lambda m, x: jax.lax.pmean(jnp.mean(x), "replica"),
    "psum of a per-replica value": lambda m, x: jax.lax.psum(x, "replica"),
    "psum of one": lambda m, x: jax.lax.psum(1, "replica"),
    "pmean of a loss": lambda m, x: jax.lax.pmean(jnp.sum(m(x[None])), "replica"),
    "pmean inside value_and_grad": lambda m, x: nnx.value_and_grad(
        lambda m: jax.lax.pmean(jnp.sum(m(x[None])), "replica")
    )(m)[0],
    "psum inside value_and_grad": lambda m, x: nnx.value_and_grad(
        lambda m: jax.lax.psum(jnp.sum(m(x[None])), "replica")
    )(m)[0],
    "pmax": lambda m, x: jax.lax.pmax(x, "replica"),
    "a gradient as it is": lambda m, x: gradient(m, x),
    "psum of a gradient": lambda m, x: jax.lax.psum(gradient(m, x), "replica"),
    "pmean of a gradient": lambda m, x: jax.lax.pmean(gradient(m, x), "replica"),
    "psum of a constant array": lambda m, x: jax.lax.psum(jnp.ones(3), "replica"),
    "psum of a gradient with respect to the batch": lambda m, x: jax.lax.psum(
        jax.grad(lambda x: jnp.sum(m(x[None]) ** 2))(x), "replica"
    ),
    "psum of a shared value times a local one": lambda m, x: jax.lax.psum(
        m.bias[...] * x, "replica"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fn", MEANT.values(), ids=MEANT)
def test_meant_reductions_are_no_errors(strategy, batch, fn):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    results = strategy.run(lambda x: fn(model, x), args=(batch,))
    assert len(strategy.local_results(results)) == (
        1 if not jax.tree.leaves(results) or isinstance(results, int) else 2
    )


def test_psum_of_one_counts_replicas(strategy, batch):
    result = strategy.run(lambda x: x * 0 + jax.lax.psum(1, "replica"), args=(batch,))
    np.testing.assert_array_equal(strategy.local_results(result)[1], [2, 2])


def test_a_loss_averaged_by_pmean_has_the_gradient_of_the_mean(strategy, batch):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def step_fn(x):
        grads = nnx.grad(lambda m: jax.lax.pmean(jnp.sum(m(x[None])), "replica"))
        return armillary.all_reduce("mean", grads(model))

    grads = strategy.local_results(strategy.run(step_fn, args=(batch,)))[0]
    np.testing.assert_allclose(grads["kernel"][...], [[2], [3]])


def test_a_branch_that_replicas_take_differently_cannot_reduce(strategy, batch):
    def step_fn(x):
        return jax.lax.cond(
            x[0] > 1,
            lambda: jax.lax.psum(x, "replica"),
            lambda: jax.lax.psum(x * 2, "replica"),
        )

    with pytest.raises(ReplicaMismatchError) as caught:
        strategy.run(step_fn, args=(batch,))
    message = str(caught.value)
    assert re.match(r"`cond` at .*test_replicas\.py:\d+", message)
    assert (
        "is decided by a value that differs between replicas (computed from one "
        "replica's share of the batch), and reduces over replicas inside, so that some "
        "would wait there for ever. Reduce the value that decides first "
        "(`armillary.all_reduce`), reduce outside, or choose with `jnp.where`."
    ) in message


def test_a_loop_that_replicas_leave_differently_cannot_reduce(strategy, batch):
    def step_fn(x):
        return jax.lax.while_loop(
            lambda carry: carry[0] < 5.0,
            lambda carry: carry + jax.lax.psum(carry, "replica"),
            x,
        )

    with pytest.raises(ReplicaMismatchError, match=r"`while` at .*test_replicas\.py"):
        strategy.run(step_fn, args=(batch,))


def test_a_branch_that_all_replicas_take_may_reduce(strategy, batch):
    def step_fn(x):
        first = jax.lax.pmax(x[0], "replica")
        return jax.lax.cond(
            first > 1,
            lambda: jax.lax.psum(x, "replica"),
            lambda: jax.lax.psum(x * 2, "replica"),
        )

    results = strategy.local_results(strategy.run(step_fn, args=(batch,)))
    np.testing.assert_array_equal(results[0], [4, 6])


def test_a_branch_without_reductions_may_differ(strategy, batch):
    results = strategy.run(
        lambda x: jax.lax.cond(x[0] > 1, lambda: x * 2, lambda: x), args=(batch,)
    )
    np.testing.assert_array_equal(results.stacked, [[1, 2], [6, 8]])
