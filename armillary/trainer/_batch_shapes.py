"""Checks that the batches of a step have no more shapes than the options allow."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

from armillary._checks import counted
from armillary.errors import RetraceError
from armillary.state._slots import describe
from armillary.trainer._step_method import StepMethod
from armillary.typing import PyTree

Leaves: TypeAlias = dict[Any, Any]
"""The arrays of batches, by their paths."""


def check_shapes(
    method: StepMethod, seen: list[Leaves], batches: Sequence[PyTree]
) -> None:
    """Checks that batches are like the first ones, and records a new shape.

    The number of examples may differ. `seen` has the first batches of each shape.
    """
    axis = 1 if method.strategy.layout.stacked else 0
    now = dict(jax.tree_util.tree_leaves_with_path(list(batches)))
    changes = [_compare(first, now, axis) for first in seen]
    is_known = not all(changes)
    if is_known:
        return  # These batches are like the first ones of a known shape.

    most = method.options.max_shapes
    is_shape_only = bool(seen) and _kinds_of(seen[0]) == _kinds_of(now)
    is_allowed = is_shape_only and len(seen) < most
    if not seen or is_allowed:
        seen.append(now)
        return

    fix = (
        "Give all batches one dtype and one structure, for example with `.astype` "
        "where they are made; `max_shapes` allows only different shapes."
    )
    if is_shape_only:
        kind = "Evaluator" if method.is_evaluation else "Trainer"
        more = 2 * most if most > 1 else 8
        fix = (
            "Only the number of examples may be smaller at the end of the data. Pad "
            "sequences to a few lengths (buckets), and pass the number of lengths: "
            f"`Standard{kind}Options(max_shapes={more})`."
        )
    shown = "\n".join(changes[0])
    raise RetraceError(
        f"Batches changed after `{method.name}` was compiled for "
        f"{counted(len(seen), 'shape')} of them:\n{shown}\n{fix}"
    )


def _kinds_of(leaves: Leaves) -> dict[Any, tuple[int, Any]]:
    """Returns the number of axes and the dtype of each leaf."""
    return {path: (leaf.ndim, leaf.dtype) for path, leaf in leaves.items()}


def _compare(first: Leaves, now: Leaves, axis: int) -> list[str]:
    """Returns lines on differences other than the number of examples."""
    changes: list[str] = []
    for path in first | now:
        old = first.get(path)
        new = now.get(path)
        if _example_type(old, axis) != _example_type(new, axis):
            name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
            before = "nothing" if old is None else describe(old)
            after = "nothing" if new is None else describe(new)
            changes.append(f"  {name or 'the batch'}: {before} became {after}")
    return changes


def _example_type(leaf: Any, axis: int) -> tuple[Any, ...] | None:
    """Returns the dtype and shape of one example, or `None` without a leaf."""
    if leaf is None:
        return None
    example_shape = leaf.shape[axis + 1 :]
    return (leaf.dtype, *example_shape)
