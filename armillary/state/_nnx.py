"""Slots in Flax NNX variables.

The only file that touches private attributes of Flax: the raw value and the trace state
of a variable, and the trace state of a graph node. NNX refuses to mutate an object
under another trace than the one it was made in, so lifting moves variables and nodes
into the trace of the step, and back. `_check_flax` fails at import if a release renames
them.
"""

from collections.abc import Callable
from typing import Any

import flax
import jax
from flax import nnx
from flax.nnx import tracers

from armillary.errors import StateStructureError
from armillary.state._slots import Role, Slot, join, key_name

_ROLES = (
    (nnx.metrics.MetricState, Role.METRIC),
    (nnx.BatchStat, Role.BATCH_STATISTIC),
    (nnx.RngKey, Role.RANDOM_KEY),
)


class NnxSlot(Slot):
    """The value of one `nnx.Variable`."""

    def __init__(self, variable: nnx.Variable, path: str) -> None:
        self.variable, self.path = variable, path
        self.key = id(variable)
        self.role = next(
            (role for kind, role in _ROLES if isinstance(variable, kind)), Role.PLAIN
        )
        self.annotations = dict(variable.get_metadata())
        entries, self._treedef = jax.tree_util.tree_flatten_with_path(self._get())
        self.paths = tuple(_leaf_path(path, keys) for keys, _ in entries)
        # Nearly every variable is one array, and many are read at each loop.
        self._is_leaf = jax.tree_util.treedef_is_leaf(self._treedef)

    def _get(self) -> Any:
        return self.variable._raw_value

    def read(self) -> list[jax.Array]:
        value = self.variable._raw_value
        if self._is_leaf and isinstance(value, jax.Array):
            return [value]
        leaves, treedef = jax.tree.flatten(self._get())
        if treedef != self._treedef:
            raise StateStructureError(
                f"{self.path}: tree structure {self._treedef} became {treedef}"
            )
        return leaves

    def write(self, leaves: list[Any]) -> None:
        if self._is_leaf:
            object.__setattr__(self.variable, "_raw_value", leaves[0])
            return
        object.__setattr__(self.variable, "_raw_value", self._treedef.unflatten(leaves))

    def swap(self, leaves: list[Any]) -> Callable[[], None]:
        variable = self.variable
        value, trace_state = variable._raw_value, variable._trace_state
        self.write(leaves)
        object.__setattr__(variable, "_trace_state", tracers.TraceState())

        def restore() -> None:
            object.__setattr__(variable, "_raw_value", value)
            object.__setattr__(variable, "_trace_state", trace_state)

        return restore


def is_variable(value: Any) -> bool:
    """Returns whether `value` is an NNX variable."""
    return isinstance(value, nnx.Variable)


def is_node(value: Any) -> bool:
    """Returns whether `value` is an NNX object that holds variables."""
    return isinstance(value, nnx.Pytree)


def merges_by_sum(value: Any) -> bool:
    """Returns whether the state of a metric on several replicas adds up.

    That of Welford's algorithm holds a running mean, which does not.
    """
    return not isinstance(value, nnx.metrics.Welford)


def is_attribute(name: str) -> bool:
    """Returns whether an entry of a node's `__dict__` is the user's."""
    return not name.startswith("_pytree__")


def swap_node(node: nnx.Pytree) -> Callable[[], None]:
    """Moves a graph node into the current trace; returns a function that undoes it."""
    state = node._pytree__state
    old = state._trace_state
    state._trace_state = tracers.TraceState()

    def restore() -> None:
        state._trace_state = old
        # `nnx.grad` gives its nodes new state objects, made in a trace that has ended.
        object.__setattr__(node, "_pytree__state", state)

    return restore


def _leaf_path(path: str, keys: tuple[Any, ...]) -> str:
    for entry in keys:
        path = join(path, key_name(entry))
    return path


def _check_flax() -> None:
    class Probe(nnx.Pytree):
        pass

    variable, node = nnx.Variable(0), Probe()
    missing = [
        f"{path}.{name}"
        for path, owner, name in (
            ("nnx.Variable", variable, "_raw_value"),
            ("nnx.Variable", variable, "_trace_state"),
            ("nnx.Pytree", node, "_pytree__state"),
            (
                "nnx.Pytree._pytree__state",
                getattr(node, "_pytree__state", None),
                "_trace_state",
            ),
        )
        if not hasattr(owner, name)
    ]
    if missing:
        raise ImportError(
            f"flax {flax.__version__} has no {', '.join(missing)}, which Armillary "
            "needs to lift NNX state. Install a release it knows: "
            'pip install "flax~=0.12.8".'
        )


_check_flax()
