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
    if not all(changes):
        return
    most = method.options.max_shapes
    kinds = [
        {path: (leaf.ndim, leaf.dtype) for path, leaf in leaves.items()}
        for leaves in (*seen[:1], now)
    ]
    is_shape_only = kinds[0] == kinds[-1]
    if not seen or (is_shape_only and len(seen) < most):
        seen.append(now)
        return
    kind = "Evaluator" if method.is_evaluation else "Trainer"
    fix = (
        "Only the number of examples may be smaller at the end of the data. Pad "
        "sequences to a few lengths (buckets), and pass the number of lengths: "
        f"`Standard{kind}Options(max_shapes={2 * most if most > 1 else 8})`."
        if is_shape_only
        else "Give all batches one dtype and one structure, for example with `.astype` "
        "where they are made; `max_shapes` allows only different shapes."
    )
    shown = "\n".join(changes[0])
    raise RetraceError(
        f"Batches changed after `{method.name}` was compiled for "
        f"{counted(len(seen), 'shape')} of them:\n{shown}\n{fix}"
    )


def _compare(first: Leaves, now: Leaves, axis: int) -> list[str]:
    """Returns lines on differences other than the number of examples."""
    changes: list[str] = []
    for path in first | now:
        pair = [leaves.get(path) for leaves in (first, now)]
        parts = [leaf and (leaf.dtype, *leaf.shape[axis + 1 :]) for leaf in pair]
        if parts[0] != parts[1]:
            name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
            old, new = ("nothing" if leaf is None else describe(leaf) for leaf in pair)
            changes.append(f"  {name or 'the batch'}: {old} became {new}")
    return changes
