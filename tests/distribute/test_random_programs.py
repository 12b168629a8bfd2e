"""Tests random programs: replicas stay equal, or the step is refused.

More of them: `ARMILLARY_PROGRAMS=2000 pytest tests/distribute/test_random_programs.py`.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import armillary
from armillary.errors import ReplicaMismatchError
from tests.distribute.random_programs import (
    SIZE,
    WouldHangError,
    programs,
    reduces_in_loss,
    run_by_hand,
    run_traced,
)

NUM_PROGRAMS = int(os.environ.get("ARMILLARY_PROGRAMS", "10"))
CONSTANT = np.array([0.25, -0.5, 1.0], np.float32)


class State:
    def __init__(self):
        self.w = nnx.Param(jnp.array([0.5, -1.0, 0.75]))
        self.mirrored = nnx.Variable(jnp.zeros(SIZE))
        self.mean = nnx.BatchStat(jnp.zeros(SIZE))
        self.sum = nnx.metrics.MetricState(jnp.ones(SIZE))


def copies(variable):
    return [np.asarray(shard.data) for shard in variable[...].addressable_shards]


@pytest.mark.slow
@settings(
    max_examples=NUM_PROGRAMS,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # to shrink a program takes minutes
    suppress_health_check=list(HealthCheck),
)
@given(
    program=programs(),
    num_replicas=st.sampled_from([2, 2, 4]),
    reduces=st.booleans(),
    seed=st.integers(0, 99),
)
def test_replicas_stay_equal_and_compute_what_one_would(
    program, num_replicas, reduces, seed
):
    strategy = armillary.MirroredStrategy(jax.devices()[:num_replicas])
    rows = np.random.default_rng(seed).normal(size=(num_replicas, SIZE))
    layout = strategy.layout
    batch = layout.wrap(
        layout.place(rows.astype(np.float32)), tuple(range(num_replicas))
    )
    if reduces:
        program = (*program, ("mean", -1))
    state = State()
    constant = jnp.asarray(CONSTANT)
    replicas = [
        [state.w[...], row, constant, jnp.full(SIZE, number, jnp.float32)]
        for number, row in enumerate(jnp.float32(rows))
    ]
    try:
        expected = run_by_hand(program, replicas)
    except WouldHangError:
        expected = None

    def step_fn(row):
        number = armillary.get_replica_context().replica_id_in_sync_group
        values = [state.w[...], row, constant, jnp.full(SIZE, number, jnp.float32)]
        result = run_traced(program, values)
        state.mean[...] = result
        state.sum[...] = state.sum[...] + result
        state.mirrored[...] = result
        return result

    try:
        result = strategy.run(step_fn, args=(batch,))
    except ReplicaMismatchError as error:
        # A value that was reduced last is equal: only the way to it may be refused.
        assert not reduces or "is decided by" in str(error)
        return
    if expected is None:
        # JAX leaves out operations that a derivative does not need.
        assert reduces_in_loss(program), "replicas would wait for each other for ever"
        return
    check = np.testing.assert_allclose
    for variable in (state.mirrored, state.mean, state.sum):
        held = copies(variable)
        assert all(np.array_equal(copy, held[0], equal_nan=True) for copy in held)
    check(copies(state.mirrored)[0], expected[0], rtol=1e-4, atol=1e-5)
    check(copies(state.mean)[0], np.mean(expected, 0), rtol=1e-4, atol=1e-5)
    check(copies(state.sum)[0], 1 + np.sum(expected, 0), rtol=1e-4, atol=1e-5)
    parts = strategy.local_results(result)
    for part, value in zip(parts, expected, strict=True):
        check(part, value, rtol=1e-4, atol=1e-5)
