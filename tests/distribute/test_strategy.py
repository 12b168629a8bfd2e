"""Tests of the errors of calls that every strategy has."""

import re

import jax.numpy as jnp
import pytest

import armillary
from armillary import MirroredStrategy, get_replica_context
from armillary.distribute import DefaultStrategy, ReduceOp
from armillary.errors import (
    DoubleReductionError,
    ReplicaContextError,
)
from tests.mistakes import mistakes

PLAIN = (
    "`value` is 2.5, which is not a per-replica value, so ReduceOp.SUM over 2 "
    "replicas has no meaning. Pass the result of `strategy.run`, or use ReduceOp.MEAN."
)
UNKNOWN = "`reduce_op` is 'median', but it must be"


def all_reduce(op, value):
    return get_replica_context().all_reduce(op, value)


@mistakes(
    {
        TypeError: {
            "`fn` is 3 of type int, but it must be call": lambda s, _: s.run(3),
            "with the comma": lambda s, _: s.run(lambda x: x, args=jnp.ones(2)),
        },
        ReplicaContextError: {
            "`set_strategy` was called inside": (
                lambda s, _: s.run(lambda: armillary.distribute.set_strategy(None))
            ),
        },
        DoubleReductionError: {
            r"does not depend on the batch. Use the": lambda s, _: s.reduce(
                "sum", s.run(lambda x: jnp.sum(x), args=(jnp.ones(4),))
            ),
        },
        ValueError: {
            f"^{re.escape(PLAIN)}$": lambda s, _: s.reduce(ReduceOp.SUM, {"loss": 2.5}),
            UNKNOWN: lambda s, rows: s.reduce("median", rows),
            f"{UNKNOWN} ": lambda s, _: s.run(
                lambda: all_reduce("median", jnp.ones(1))
            ),
            r"value of each replica has shape \(\)": (
                lambda s, rows: s.gather(rows, axis=0)
            ),
            "out of bounds": lambda s, rows: s.reduce("sum", rows, axis=1),
        },
    }
)
def test_calls_that_a_strategy_does_not_support_are_errors(
    call, error, message, make_mirrored, put_rows
):
    strategy = make_mirrored(2)
    with pytest.raises(error, match=message):
        call(strategy, put_rows(strategy, [1, 2]))


@pytest.mark.parametrize(
    ("call", "name", "instead"),
    [
        (lambda s: s.run(lambda: None), "strategy.run", "call `fn` directly"),
        (
            lambda s: s.reduce(ReduceOp.SUM, 1.0),
            "strategy.reduce",
            "use `get_replica_context().all_reduce` there",
        ),
        (
            lambda s: s.gather(1.0, axis=0),
            "strategy.gather",
            "use `get_replica_context().all_gather` there",
        ),
        (
            lambda s: s.scope().__enter__(),
            "strategy.scope",
            "enter the scope around `run`",
        ),
    ],
    ids=["run", "reduce", "gather", "scope"],
)
@pytest.mark.parametrize("strategy", [DefaultStrategy(), MirroredStrategy()])
def test_cross_replica_calls_inside_run_are_errors(strategy, call, name, instead):
    with pytest.raises(ReplicaContextError) as caught:
        strategy.run(lambda: call(strategy))
    assert str(caught.value).startswith(
        f"`{name}` was called inside `Strategy.run`, where each replica sees only its "
        f"own values. Move the call out of the function given to `strategy.run`, or "
        f"{instead}."
    )
