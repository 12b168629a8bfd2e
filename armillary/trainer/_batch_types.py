"""The types of the batches that a step is traced for, and which of them may change."""

from collections.abc import Sequence
from typing import Any

import jax

from armillary.data._layout import Active
from armillary.errors import RetraceError
from armillary.state._slots import describe
from armillary.trainer._step_method import StepMethod
from armillary.typing import PyTree


def key_of(batches: Sequence[PyTree], active: tuple[Active, ...]) -> Any:
    """Returns a key that is equal for batches which one trace serves."""
    leaves, treedef = jax.tree.flatten(list(batches))
    return treedef, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves), active


def check_types(
    method: StepMethod, first: Sequence[PyTree], batches: Sequence[PyTree]
) -> None:
    """Checks that batches differ from the first ones in their size only.

    Raises:
        RetraceError: If anything else differs.
    """
    axis = 1 if method.strategy.layout.stacked else 0
    changes = [
        change
        for old, new in zip(first, batches, strict=True)
        for change in _compare(old, new, axis)
    ]
    if changes:
        shown = "\n".join(changes)
        raise RetraceError(
            f"Batches changed after `{method.name}` was compiled, and it would be "
            f"compiled again for each new shape:\n{shown}\n"
            "Only the number of examples may be smaller at the end of the data. "
            "Give all batches one shape and dtype, for example by padding "
            "sequences to a fixed length."
        )


def _compare(first: PyTree, batch: PyTree, axis: int) -> list[str]:
    old, new = jax.tree.structure(first), jax.tree.structure(batch)
    if old != new:
        return [f"  structure {old} became {new}"]
    changes = []
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(batch), strict=True
    )
    for (path, old_leaf), leaf in pairs:
        if _without(old_leaf, axis) != _without(leaf, axis):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            was, became = describe(old_leaf), describe(leaf)
            changes.append(f"  {name or 'the batch'}: {was} became {became}")
    return changes


def _without(leaf: Any, axis: int) -> tuple[Any, ...]:
    return (*leaf.shape[axis + 1 :], str(leaf.dtype))
