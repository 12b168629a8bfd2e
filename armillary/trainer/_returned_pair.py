"""The result of a pure step: a pair of the state after the step, and its metrics."""

from collections.abc import Mapping
from typing import Any

from armillary.distribute.replica._pure_state import is_like, take_back
from armillary.errors import StateStructureError
from armillary.state._slots import describe
from armillary.typing import PyTree


def take_pair(held: PyTree, result: Any) -> tuple[PyTree, Any]:
    """Returns the state that a step left, checked, and the metrics that it returned.

    Args:
        held: The state that the step took.
        result: The return value of the step.

    Raises:
        TypeError: If `result` is not a pair, or is the state alone.
        StateStructureError: If the state has other leaves, shapes or dtypes than
            `held`. The message says so if the state is the second of the pair.
    """
    is_tuple = isinstance(result, tuple)
    if not is_tuple or len(result) != 2:
        shown = f"{len(result)} values" if is_tuple else describe(result)
        if result is None:
            shown = "nothing"
        elif is_like(held, result):
            shown = "the state alone, without metrics"
        raise _not_a_pair(shown)
    state, metrics = result
    try:
        return take_back(held, state), metrics
    except StateStructureError:
        if is_like(held, result):
            shown = "the state alone, a tuple of two, without metrics"
            raise _not_a_pair(shown) from None
        if isinstance(state, Mapping | None) and is_like(held, metrics):
            raise StateStructureError(
                f"`step` returned {describe(state)} first and the state second, but "
                "the state must be first. Are the two swapped? Write "
                "`return state, metrics`."
            ) from None
        raise


def _not_a_pair(shown: str) -> TypeError:
    return TypeError(
        f"`step` returned {shown}, but it must return a pair: the state after the "
        "step, and its metrics. Write `return state, metrics`, with `{}` if there are "
        "none."
    )
