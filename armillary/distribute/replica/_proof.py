"""Refuses steps that would leave replicas different, or wait for each other for ever.

What JAX's types say is known at once; what only the whole program shows is found by
`Differences` when it has been traced. So while a step is traced, `require_equal` marks
what must be equal, and `prove` looks at all marks together; each refusal then has the
line that made the value. A step that runs without a compiler has no program to look at,
and the types decide alone.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from armillary._jaxpr import source_line, walk_programs
from armillary.distribute.replica._collectives import double_reduction_message
from armillary.distribute.replica._differences import (
    Conflict,
    Differences,
    Reasons,
    mark,
)
from armillary.distribute.replica._loss_scale import warn_of_scale
from armillary.distribute.replica._policy import ON_READ_SCOPE
from armillary.distribute.replica._retype import AXIS_NAME, varies
from armillary.errors import DoubleReductionError, ReplicaMismatchError

_local = threading.local()


@contextlib.contextmanager
def proved_later() -> Iterator[None]:
    """Leaves what `require_equal` finds under it to a call of `prove`."""
    before = getattr(_local, "is_active", False)
    _local.is_active = True
    try:
        yield
    finally:
        _local.is_active = before


def require_equal(
    values: Sequence[Any], names: Sequence[str], num_slots: int
) -> list[Any]:
    """Returns values of mirrored state, which are equal on all replicas or refused.

    Raises:
        ReplicaMismatchError: If a type says that a value differs, and nobody proves it
            later.
    """
    if getattr(_local, "is_active", False):
        return list(map(_mark_one, values, names))
    differing = [
        name for name, value in zip(names, values, strict=True) if varies(value)
    ]
    if differing:
        raise ReplicaMismatchError(_mismatch_message(differing, _SHARE, num_slots))
    return list(values)


def _mark_one(value: Any, name: str) -> Any:
    if not varies(value):
        return mark(value, name)
    # Its type says that it differs. What it computes decides, and if it is equal after
    # all, that of the first replica is everyone's.
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = _mark_one(jax.random.key_data(value), name)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    return jax.lax.all_gather(mark(value, name), AXIS_NAME, to="invarying")[0]


def prove(program: core.ClosedJaxpr, num_slots: int) -> None:
    """Raises if replicas could part in a traced step.

    Raises:
        ReplicaMismatchError: If mirrored state may end up different, or replicas may
            take different ways to a reduction.
        DoubleReductionError: If the step sums over replicas what is equal on all.
    """
    _check_reduced_once(program)
    found = Differences(program)
    if found.conflicts:
        raise ReplicaMismatchError(_conflict_message(*found.conflicts.values()))
    if found.mismatches:
        lines = [
            f"{name}, computed at {mismatch.where}"
            for name, mismatch in sorted(found.mismatches.items())
        ]
        reasons = frozenset().union(*(m.reasons for m in found.mismatches.values()))
        raise ReplicaMismatchError(_mismatch_message(lines, reasons, num_slots))
    warn_of_scale(program)


def _check_reduced_once(program: core.ClosedJaxpr) -> None:
    """Raises if a program sums over replicas what is equal on all of them.

    Such a sum shows as a cast to "varying" whose only purpose is the sum. Casts that
    JAX makes while differentiating, and those of on-read state, are meant.

    Raises:
        DoubleReductionError: At the first such sum.
    """
    has_own_data = False
    for jaxpr, _ in walk_programs(program):
        casts: set[Any] = set()
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name == "shard_map":
                has_own_data |= AXIS_NAME in str(equation.params["in_specs"])
            if name == "pvary":
                casts.update(equation.outvars)
            elif name.startswith("psum") and not _is_meant(equation):
                operands = [
                    v for v in equation.invars if not isinstance(v, core.Literal)
                ]
                if not casts.isdisjoint(operands):
                    where = f", at {source_line(equation)}"
                    message = double_reduction_message("psum", where, has_own_data)
                    raise DoubleReductionError(message)


def _is_meant(equation: Any) -> bool:
    stack = equation.source_info.name_stack.stack
    # Transformations are entries of another class than names that users give.
    transforms = [entry.name for entry in stack if type(entry).__name__ == "Transform"]
    return "transpose" in transforms or ON_READ_SCOPE in str(stack)


_SHARE: Reasons = frozenset({"one replica's share of the batch"})


def _mismatch_message(lines: list[str], reasons: Reasons, num_slots: int) -> str:
    shown = "\n".join(f"  {line}" for line in lines)
    return (
        f"{len(lines)} of {num_slots} slots are mirrored, so they must be equal "
        "on all replicas, but `strategy.run` left values in them that differ:\n"
        f"{shown}\n"
        f"They were computed from {_and(reasons)}. Reduce first "
        "(`armillary.get_replica_context().all_reduce(ReduceOp.MEAN, value)`), or make "
        "the variable with `aggregation=armillary.VariableAggregation.MEAN`, `SUM` or "
        "`ONLY_FIRST_REPLICA`."
    )


def _conflict_message(conflict: Conflict, *_: Conflict) -> str:
    return (
        f"`{conflict.kind}` at {conflict.where} is decided by a value that differs "
        f"between replicas (it was computed from {_and(conflict.reasons)}), and "
        "reduces over replicas inside (gradients with respect to mirrored parameters "
        "do), so that some replicas would wait there for ever. Reduce the value that "
        "decides first (`get_replica_context().all_reduce`), compute gradients "
        "outside, or choose with `jnp.where`."
    )


def _and(reasons: Reasons) -> str:
    return " and ".join(sorted(reasons))
