"""Slots in Flax NNX variables: the only file that touches private attributes of Flax.

NNX refuses to mutate an object outside of the trace in which it was made. So lifting
moves variables and nodes into the trace of the step, and back. NNX takes longer to
import than all of Armillary, so this file imports it only for objects of NNX.
"""

import functools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from armillary.state._slots import LeafKind, Role, Slot

if TYPE_CHECKING:
    from flax import nnx


class NnxSlot(Slot):
    def __init__(self, variable: "nnx.Variable", path: str) -> None:
        super().__init__(variable, "_raw_value", path, is_state=lambda _: True)
        self.variable = variable
        self.key = id(variable)
        self.role = _role_of(type(variable))
        self.annotations = dict(variable.get_metadata())

    def _is_alike(self, value: Any, treedef: Any) -> bool:
        # The optimizers of Flax turn a list into a `State`.
        from flax import nnx

        is_state = isinstance(value, nnx.State)
        return is_state and treedef.num_leaves == self.treedef.num_leaves

    def is_parameter(self) -> bool:
        from flax import nnx

        return isinstance(self.variable, nnx.Param)

    def is_of_optimizer(self) -> list[bool]:
        if self.is_leaf or is_of_optimizer(self.variable):
            return [is_of_optimizer(self.variable)] * len(self.paths)
        # A variable may hold the whole state of a transformation of Optax.
        return super().is_of_optimizer()

    def swap(self, leaves: Sequence[Any]) -> Callable[[], None]:
        move_back = move_variable(self.variable)
        put_back = super().swap(leaves)

        def restore() -> None:
            put_back()
            move_back()

        return restore


def read_raw(variables: Sequence["nnx.Variable"]) -> list[Any]:
    """Returns the raw values of many variables, in one pass."""
    return list(map(_get_raw, variables))


def write_raw(variables: Sequence["nnx.Variable"], values: Iterable[Any]) -> None:
    """Puts raw values into many variables, in one pass."""
    if variables:
        from flax import nnx

        set_raw = vars(nnx.Variable)["_raw_value"].__set__
        deque(map(set_raw, variables, values), maxlen=0)


def is_variable(value: Any) -> bool:
    # Not `isinstance`, which would run code of Flax for every value in a walk.
    return is_variable_type(type(value))


def is_node(value: Any) -> bool:
    return is_node_type(type(value))


@functools.lru_cache(maxsize=4096)
def is_variable_type(kind: type) -> bool:
    return issubclass(kind, getattr(sys.modules.get("flax.nnx"), "Variable", ()))


@functools.lru_cache(maxsize=4096)
def is_node_type(kind: type) -> bool:
    return issubclass(kind, getattr(sys.modules.get("flax.nnx"), "Pytree", ()))


@functools.lru_cache(maxsize=4096)
def _role_of(kind: type) -> Role:
    from flax import nnx

    roles = {
        nnx.metrics.MetricState: Role.METRIC,
        nnx.BatchStat: Role.BATCH_STATISTIC,
        nnx.RngKey: Role.RANDOM_KEY,
    }
    found = (role for base, role in roles.items() if issubclass(kind, base))
    return next(found, Role.PLAIN)


def is_of_optimizer(variable: "nnx.Variable") -> bool:
    """Returns whether a variable holds a part of the state of Optax."""
    from flax import nnx

    # The step counter of an `nnx.Optimizer` itself has a different type.
    return isinstance(variable, nnx.OptArray | nnx.OptVariable)


def kind_of(variable: "nnx.Variable", held_by: Any = None) -> LeafKind:
    """Returns the kind of a variable's value; `held_by` is its parent in a pytree."""
    role = _role_of(type(variable))
    if role is Role.METRIC and _is_welford(held_by):
        role = Role.PLAIN
    return LeafKind(role, variable.get_metadata().get("aggregation"))


def _is_welford(state: Any) -> bool:
    """Returns whether a `State` comes from `nnx.split` of a Welford metric."""
    from flax import nnx

    is_state = isinstance(state, nnx.State | dict)
    return is_state and {"count", "mean", "m2"} <= set(state.keys())


def merges_by_sum(value: Any) -> bool:
    """Returns whether the state of a metric on several replicas adds up."""
    from flax import nnx

    # Welford's algorithm has a running mean, which does not add up.
    return not isinstance(value, nnx.metrics.Welford)


def is_internal(name: Any) -> bool:
    """Returns whether an entry of a node's `__dict__` is Flax's own."""
    return isinstance(name, str) and name.startswith("_pytree__")


def metadata(variable: "nnx.Variable") -> dict[str, Any]:
    return variable._var_metadata


def assign(module: "nnx.Pytree", other: "nnx.Pytree") -> None:
    """Puts the values of one module into another with the same structure."""
    from flax import nnx

    nnx.update(module, nnx.state(other))


def is_here(part: Any) -> bool:
    """Returns whether a variable or a node may be changed in the current trace."""
    holder = part if is_variable(part) else part._pytree__state
    return holder._trace_state.is_valid()


def move_variable(variable: "nnx.Variable") -> Callable[[], None]:
    """Moves a variable into the current trace; returns a function that undoes it."""
    trace_state = variable._trace_state
    object.__setattr__(variable, "_trace_state", _make_trace_state())
    return lambda: object.__setattr__(variable, "_trace_state", trace_state)


def swap_node(node: "nnx.Pytree") -> Callable[[], None]:
    """Moves a graph node into the current trace; returns a function that undoes it."""
    state = node._pytree__state
    old = state._trace_state
    state._trace_state = _make_trace_state()

    def restore() -> None:
        state._trace_state = old
        # `nnx.grad` gives its nodes new state objects, made in a trace that has ended.
        object.__setattr__(node, "_pytree__state", state)

    return restore


def _make_trace_state() -> Any:
    from flax.nnx import tracers

    return tracers.TraceState()


# In C, because a Python loop over hundreds of variables would cost as much as a small
# step on the device.
_get_raw = operator.attrgetter("_raw_value")
