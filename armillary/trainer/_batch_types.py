"""The types of the batches that a step is traced for, and which of them may change."""

from collections.abc import Sequence
from typing import Any

import jax

from armillary.data._layout import Active
from armillary.data.sources._batch import describe_shapes
from armillary.errors import RetraceError
from armillary.state._slots import describe
from armillary.trainer._step_method import StepMethod
from armillary.typing import PyTree


def key_of(batches: Sequence[PyTree], active: tuple[Active, ...]) -> Any:
    """Returns a key that is equal for batches which one trace serves."""
    leaves, treedef = jax.tree.flatten(list(batches))
    return treedef, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves), active


class BatchShapes:
    """The shapes of batches that one step has met, whatever the number of examples."""

    def __init__(self, method: StepMethod, most: int) -> None:
        self._method, self._most = method, most
        self._axis = 1 if method.strategy.layout.stacked else 0
        # The first batches of each shape.
        self._seen: list[Sequence[PyTree]] = []

    def check(self, batches: Sequence[PyTree]) -> None:
        """Checks that batches are like the first ones, and counts a new shape."""
        changes = [self._compare(seen, batches) for seen in self._seen]
        if not all(changes):
            return
        if changes and (len(changes) == self._most or not self._is_shape_only(batches)):
            raise RetraceError(self._explain(changes[0], batches))
        self._seen.append(batches)

    def _explain(self, changes: list[str], batches: Sequence[PyTree]) -> str:
        name, most = self._method.name, self._most
        if most > 1 and self._is_shape_only(batches):
            shown = "\n".join(f"  {_show(seen)}" for seen in self._seen)
            return (
                f"`{name}` has been compiled for {most} shapes of batches, which is "
                f"`max_shapes`, and now there is another one:\n{shown}\n"
                f"  new: {_show(batches)}\n"
                "Each shape is a program of its own. Pad sequences to a few lengths "
                "(buckets), or allow more with `max_shapes`."
            )
        shown = "\n".join(changes)
        if not self._is_shape_only(batches):
            return (
                f"Batches changed after `{name}` was compiled, in more than their "
                f"shape:\n{shown}\n"
                "Give all batches one dtype and one structure, for example with "
                "`.astype` where they are made; `max_shapes` allows other shapes only."
            )
        return (
            f"Batches changed after `{name}` was compiled, and it would be compiled "
            f"again for each new shape:\n{shown}\n"
            "Only the number of examples may be smaller at the end of the data. Give "
            "all batches one shape and dtype, for example by padding sequences to a "
            "fixed length. For sequences padded to a few lengths (buckets), say how "
            f"many there are: `{_options_name(name)}(max_shapes=8)`."
        )

    def _is_shape_only(self, batches: Sequence[PyTree]) -> bool:
        return _kind(self._seen[0]) == _kind(batches)

    def _compare(self, first: Sequence[PyTree], batches: Sequence[PyTree]) -> list[str]:
        """Returns what differs in more than the number of examples."""
        pairs = zip(first, batches, strict=True)
        return [line for old, new in pairs for line in _compare(old, new, self._axis)]


def _options_name(step_name: str) -> str:
    kind = "Evaluator" if step_name.startswith("eval") else "Trainer"
    return f"Standard{kind}Options"


def _show(batches: Sequence[PyTree]) -> str:
    return "; ".join(describe_shapes(batch) for batch in batches)


def _kind(batches: Sequence[PyTree]) -> Any:
    leaves, structure = jax.tree.flatten(list(batches))
    return structure, [(len(leaf.shape), str(leaf.dtype)) for leaf in leaves]


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
