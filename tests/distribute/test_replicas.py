"""Tests that state which would differ between replicas is refused by name."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.errors import DoubleReductionError, ReplicaMismatchError
from tests.problems import Holder


@pytest.fixture
def strategy(make_mirrored):
    return make_mirrored(2)


@pytest.fixture
def batch(strategy, put_rows):
    return put_rows(strategy, [[1, 2], [3, 4]])


def test_mirrored_arrays_that_differ_are_all_named(strategy, batch):
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
        "`strategy.run` left different values on the replicas in 2 of 4 arrays of the "
        "state. Mirrored arrays must be equal on all replicas:\n"
        "  model/bias (plain, mirrored), written at test_replicas.py (step_fn)\n"
        "  root/average/total (plain, mirrored), written at test_replicas.py "
        "(step_fn)\n"
        "They were computed from one replica's share of the batch. Reduce first "
        '(`armillary.all_reduce("mean", value)`, or "sum" for sums and counts of '
        "examples), or make the variable with "
        "`aggregation=armillary.distribute.VariableAggregation.MEAN`, `SUM` or "
        "`ONLY_FIRST_REPLICA`. If its rows belong to single examples, as in a queue "
        "or a carried hidden state, a reduction would mix them: collect the rows of "
        "all replicas instead "
        "(`armillary.get_replica_context().all_gather(value, axis=0)`)."
    )
    assert model.bias[...] is before


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


def test_a_compiled_function_raises_the_error_of_its_run(strategy, batch):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def step_fn(x):
        return jax.lax.psum(jax.lax.pmean(gradient(model, x), "replica"), "replica")

    @armillary.function
    def step(x):
        return strategy.run(step_fn, args=(x,))

    with pytest.raises(DoubleReductionError, match="The sum over replicas at"):
        step(batch)


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
        "replica's share of the batch), and reduces over replicas inside, so some "
        "replicas would wait there forever. Reduce the value that decides first "
        "(`armillary.all_reduce`), reduce outside, or choose with `jnp.where`."
    ) in message
