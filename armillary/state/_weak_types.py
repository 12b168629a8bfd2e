"""Explains an error of JAX for leaves of a pure step's state with weak types.

A leaf that was made from Python numbers has a weak type. In a loop of `jax.jit`, such a
value takes the dtype of the value that is added to it. The state of a trainer keeps its
dtypes, because a loop is one program. So JAX refuses the same step in a trainer, but
its error does not name the leaf.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from armillary._checks import list_lines
from armillary.errors import StateStructureError
from armillary.state._slots import is_array
from armillary.state._tree import PURE_STATE, is_object, leaves_of
from armillary.typing import Batch, PyTree

# Parts of JAX's errors for a loop or a branch whose values change their types.
_REFUSALS = ("must have equal types", "must have identical types")


def find_weak(state: PyTree) -> frozenset[str]:
    """Returns the paths of the leaves of a state with weak types."""
    return frozenset(
        leaf.path(PURE_STATE)
        for leaf in leaves_of(state, is_object)
        if is_array(leaf.value) and getattr(leaf.value, "weak_type", False)
    )


@contextlib.contextmanager
def explained_types(
    step: Callable[..., Any],
    state: PyTree,
    batches: tuple[Batch, ...],
    weak: frozenset[str],
) -> Iterator[None]:
    """Explains a `TypeError` of a step that could run if its state had weak types."""
    try:
        yield
    except TypeError as error:
        is_of_types = any(refusal in str(error) for refusal in _REFUSALS)
        lines: list[str] = []
        if is_of_types:
            lines = _find_growing(step, state, batches, weak)
        if not lines:
            raise
        raise StateStructureError(
            "`step` lets the dtype of its state grow in a loop or a branch, as JAX "
            "allows for arrays made of Python numbers (weak types). The state of a "
            f"trainer keeps its dtypes:\n{list_lines(lines)}\n"
            f"Begin with the final dtype. The error of JAX is: {error}"
        ) from error


def _find_growing(
    step: Callable[..., Any],
    state: PyTree,
    batches: tuple[Batch, ...],
    weak: frozenset[str],
) -> list[str]:
    """Returns a line for each leaf that changes its dtype if weak types are kept."""
    leaves = list(leaves_of(state, is_object))
    structure = jax.tree.structure(state, is_leaf=is_object)
    places = [i for i, leaf in enumerate(leaves) if leaf.path(PURE_STATE) in weak]
    values = [leaves[place].value for place in places]
    types = [
        jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=True)
        for value in values
    ]

    def run(values: list[Any]) -> list[Any]:
        given = [leaf.value for leaf in leaves]
        for place, value in zip(places, values, strict=True):
            given[place] = value
        after, _ = step(structure.unflatten(given), *batches)
        results = structure.flatten_up_to(after)
        return [jnp.asarray(results[place]) for place in places]

    try:
        after = jax.eval_shape(run, types)
    except Exception:  # The step fails for a different reason.
        return []
    lines: list[str] = []
    for place, old, new in zip(places, types, after, strict=True):
        if old.dtype != new.dtype:
            shown = leaves[place].expression(PURE_STATE)
            cast = f"`{shown}.astype({str(new.dtype)!r})`"
            lines.append(f"{shown}: {old.dtype} became {new.dtype}, so give {cast}")
    return lines
