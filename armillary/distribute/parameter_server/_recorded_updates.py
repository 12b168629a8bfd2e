"""What becomes of optimizers in a scheduled function.

On a worker, each Optax transformation of the function stands for the one on the
parameter servers: its `update` takes down the gradients, which are sent, and returns
updates that nothing may use but `optax.apply_updates`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.extend.core import Primitive

from armillary.distribute.parameter_server._worker_strategy import alone_message
from armillary.distribute.replica._all_reduce import AllReduceState
from armillary.distribute.replica._context import get_replica_context, lifted_state
from armillary.errors import ReplicaContextError
from armillary.typing import PyTree


class UpdateSpec(NamedTuple):
    """One call of `update` in a scheduled function.

    Attributes:
        transformation: Which of the function's transformations.
        gradients: The gradients' tree, with their number among all of this call.
        state: The state's tree, with the number of the slot of each array.
        params: The parameters' tree, likewise.
        types: Shape and dtype of each gradient.
    """

    transformation: int
    gradients: PyTree
    state: PyTree
    params: PyTree
    types: tuple[Any, ...]


class Recorded(NamedTuple):
    """What calls of `update` were given while a function was traced."""

    specs: list[UpdateSpec]
    gradients: list[list[jax.Array]]


# The updates that a worker's optimizer returns: an operation that names its call and
# leaf, so that their use can be found in the traced program.
server_update_p = Primitive("server_update")
server_update_p.def_abstract_eval(lambda gradient, **_: gradient)

_recording: list[Recorded] = []


@contextmanager
def recording() -> Iterator[Recorded]:
    """Takes down what optimizers are given, while a function is traced."""
    _recording.append(Recorded([], []))
    try:
        yield _recording[-1]
    finally:
        _recording.pop()


def make_stand_in(index: int) -> optax.GradientTransformationExtraArgs:
    """Returns what stands for a transformation on a worker."""

    def init(params: PyTree) -> PyTree:
        raise RuntimeError(
            "`init` of an Optax transformation was called in a scheduled function, "
            "where its state would be made anew at each call. Make it once, outside, "
            "and hold it in an attribute."
        )

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **others: Any
    ) -> tuple[PyTree, PyTree]:
        return _record(index, updates, state, params, others), state

    return optax.GradientTransformationExtraArgs(init, update)


def _record(
    index: int, gradients: PyTree, state: PyTree, params: PyTree, others: dict[str, Any]
) -> PyTree:
    """Takes down one call, and returns its updates."""
    lifted = lifted_state()
    if not _recording or lifted is None:
        raise RuntimeError(
            "An optimizer was used on a worker outside of a scheduled function."
        )
    given = sorted(name for name, value in others.items() if value is not None)
    if given:
        raise ValueError(
            f"`update` of an optimizer was given {', '.join(given)} in a scheduled "
            "function. Parameter servers get gradients only: use an optimizer that "
            "needs nothing else."
        )
    if params is None:
        raise ValueError(
            "`update` of an optimizer was called without `params` in a scheduled "
            "function, so nothing tells which variables are to be updated. Write "
            "`tx.update(gradients, state, params)`."
        )
    context = get_replica_context()
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, AllReduceState))
    has_own = any(isinstance(leaf, AllReduceState) for leaf in leaves)
    if has_own and context is not None and context.num_replicas_in_sync > 1:
        raise ReplicaContextError(alone_message("all_reduce_gradients"))
    places = {id(leaf): i for i, leaf in enumerate(lifted.read())}

    def place_of(leaf: Any, what: str) -> int:
        if id(leaf) not in places:
            raise ValueError(
                f"`update` of an optimizer was given {what} that no variable holds "
                "(an array computed in the scheduled function). Pass what variables "
                "hold: updates are made where they live."
            )
        return places[id(leaf)]

    leaves, treedef = jax.tree.flatten(gradients)
    recorded = _recording[-1]
    spec = UpdateSpec(
        index,
        treedef.unflatten(range(len(leaves))),
        jax.tree.map(lambda leaf: place_of(leaf, "state"), state),
        jax.tree.map(lambda leaf: place_of(leaf, "parameters"), params),
        tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves),
    )
    slots = jax.tree.leaves(spec.params)
    if len(slots) != len(leaves) or len(set(slots)) < len(slots):
        raise ValueError(
            f"`update` of an optimizer was given {len(leaves)} gradients for "
            f"{len(set(slots))} variables. Pass one gradient for each of `params`."
        )
    number = len(recorded.specs)
    recorded.specs.append(spec)
    recorded.gradients.append(leaves)
    return treedef.unflatten(
        server_update_p.bind(leaf, call=number, leaf=i) for i, leaf in enumerate(leaves)
    )
