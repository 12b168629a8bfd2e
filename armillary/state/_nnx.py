"""Slots in Flax NNX variables.

The only file that touches private attributes of Flax: the raw value and the trace state
of a variable, and the trace state of a graph node. NNX refuses to mutate an object
under another trace than the one it was made in, so lifting moves variables and nodes
into the trace of the step, and back. `_check_flax` fails at the first variable if a
release renames them.

NNX takes longer to import than all of Armillary. A program that did not import it has
no variable of it, so this file imports it where there is one, and not before.
"""

import functools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from armillary.errors import StateStructureError
from armillary.state._opaque import is_array
from armillary.state._slots import Held, Role, Slot, join_keys

if TYPE_CHECKING:
    from flax import nnx


_LEAF = jax.tree.structure(0)


class NnxSlot(Slot):
    """The value of one `nnx.Variable`."""

    def __init__(self, variable: "nnx.Variable", path: str) -> None:
        self.variable, self.path = variable, path
        self.key = id(variable)
        self.role = _role_of(type(variable))
        self.annotations = dict(variable.get_metadata())
        value = variable._raw_value
        # Nearly every variable is one array, and many are read at each loop.
        if is_array(value):
            self.paths, self._treedef, self.is_leaf = (path,), _LEAF, True
            return
        entries, self._treedef = jax.tree_util.tree_flatten_with_path(value)
        self.paths = tuple(join_keys(path, keys) for keys, _ in entries)
        # JAX also calls a node without leaves, such as `optax.MaskedNode()`, a leaf.
        self.is_leaf = jax.tree_util.treedef_is_leaf(self._treedef) and bool(entries)

    def raw(self) -> Any:
        value = self.variable._raw_value
        if self.is_leaf:
            return value
        leaves, treedef = jax.tree.flatten(value)
        return Held(treedef, leaves)

    def read(self) -> list[jax.Array]:
        value = self.variable._raw_value
        if self.is_leaf and isinstance(value, jax.Array):
            return [value]
        leaves, treedef = jax.tree.flatten(value)
        if treedef != self._treedef and not self._is_rewritten(value, treedef):
            raise StateStructureError(
                f"{self.path}: tree structure {self._treedef} became {treedef}"
            )
        return leaves

    def _is_rewritten(self, value: Any, treedef: Any) -> bool:
        """Returns whether Flax made a `State` of a list, as its optimizers do."""
        is_state = isinstance(value, _flax().state_type)
        return is_state and treedef.num_leaves == self._treedef.num_leaves

    def write(self, leaves: list[Any]) -> None:
        if self.is_leaf:
            object.__setattr__(self.variable, "_raw_value", leaves[0])
            return
        object.__setattr__(self.variable, "_raw_value", self._treedef.unflatten(leaves))

    def is_of_optimizer(self) -> list[bool]:
        return [isinstance(self.variable, _flax().optimizer)] * len(self.paths)

    def swap(self, leaves: list[Any]) -> Callable[[], None]:
        variable = self.variable
        value, trace_state = variable._raw_value, variable._trace_state
        self.write(leaves)
        object.__setattr__(variable, "_trace_state", _flax().make_trace_state())

        def restore() -> None:
            object.__setattr__(variable, "_raw_value", value)
            object.__setattr__(variable, "_trace_state", trace_state)

        return restore


def read_raw(variables: Sequence["nnx.Variable"]) -> list[Any]:
    """Returns the raw values of many variables, in one go."""
    return list(map(_get_raw, variables))


def write_raw(variables: Sequence["nnx.Variable"], values: Iterable[Any]) -> None:
    """Puts raw values into many variables, in one go."""
    if variables:
        deque(map(_flax().set_raw, variables, values), maxlen=0)


def variable_type() -> "type[nnx.Variable] | tuple[()]":
    """Returns what `isinstance` knows NNX variables by: nothing, if there are none."""
    return getattr(sys.modules.get("flax.nnx"), "Variable", ())


def is_variable(value: Any) -> bool:
    """Returns whether `value` is an NNX variable."""
    # Not `isinstance`, which runs code of Flax's for every value in a walk.
    return is_variable_type(type(value))


def is_node(value: Any) -> bool:
    """Returns whether `value` is an NNX object that holds variables."""
    return is_node_type(type(value))


@functools.lru_cache(maxsize=4096)
def is_variable_type(kind: type) -> bool:
    """Returns whether instances of `kind` are NNX variables."""
    return issubclass(kind, variable_type())


@functools.lru_cache(maxsize=4096)
def is_node_type(kind: type) -> bool:
    """Returns whether instances of `kind` are NNX objects that hold variables."""
    return issubclass(kind, getattr(sys.modules.get("flax.nnx"), "Pytree", ()))


@functools.lru_cache(maxsize=4096)
def _role_of(kind: type) -> Role:
    roles = (role for base, role in _flax().roles if issubclass(kind, base))
    return next(roles, Role.PLAIN)


def merges_by_sum(value: Any) -> bool:
    """Returns whether the state of a metric on several replicas adds up.

    That of Welford's algorithm holds a running mean, which does not.
    """
    from flax import nnx

    return not isinstance(value, nnx.metrics.Welford)


def is_internal(name: Any) -> bool:
    """Returns whether an entry of a node's `__dict__` is Flax's own."""
    return isinstance(name, str) and name.startswith("_pytree__")


def metadata(variable: "nnx.Variable") -> dict[str, Any]:
    """Returns what was set on a variable, in the dictionary that holds it."""
    return variable._var_metadata


def is_here(part: Any) -> bool:
    """Returns whether a variable or a node may be changed in the current trace."""
    holder = part if is_variable(part) else part._pytree__state
    return holder._trace_state.is_valid()


def move_variable(variable: "nnx.Variable") -> Callable[[], None]:
    """Moves a variable into the current trace; returns a function that undoes it."""
    trace_state = variable._trace_state
    object.__setattr__(variable, "_trace_state", _flax().make_trace_state())
    return lambda: object.__setattr__(variable, "_trace_state", trace_state)


def swap_node(node: "nnx.Pytree") -> Callable[[], None]:
    """Moves a graph node into the current trace; returns a function that undoes it."""
    state = node._pytree__state
    old = state._trace_state
    state._trace_state = _flax().make_trace_state()

    def restore() -> None:
        state._trace_state = old
        # `nnx.grad` gives its nodes new state objects, made in a trace that has ended.
        object.__setattr__(node, "_pytree__state", state)

    return restore


class _Flax(NamedTuple):
    """What lifting needs of NNX.

    Attributes:
        roles: The types of variables that have a role, with the role.
        optimizer: The types of variables in the state of an Optax transformation; the
            optimizer's own count of steps is of another type.
        state_type: What the updates of an optimizer leave in place of a list.
        make_trace_state: Returns the state of the current trace.
        set_raw: Puts a raw value into a variable.
    """

    roles: tuple[tuple[type, Role], ...]
    optimizer: tuple[type, ...]
    state_type: type
    make_trace_state: Callable[[], Any]
    set_raw: Callable[[Any, Any], None]


@functools.cache
def _flax() -> _Flax:
    from flax import nnx
    from flax.nnx import tracers

    _check_flax()
    return _Flax(
        roles=(
            (nnx.metrics.MetricState, Role.METRIC),
            (nnx.BatchStat, Role.BATCH_STATISTIC),
            (nnx.RngKey, Role.RANDOM_KEY),
        ),
        optimizer=(nnx.OptArray, nnx.OptVariable),
        state_type=nnx.State,
        make_trace_state=tracers.TraceState,
        set_raw=vars(nnx.Variable)["_raw_value"].__set__,
    )


def _check_flax() -> None:
    import flax
    from flax import nnx

    class Probe(nnx.Pytree):
        pass

    variable, node = nnx.Variable(0), Probe()
    missing = [
        f"{path}.{name}"
        for path, owner, name in (
            ("nnx.Variable", variable, "_raw_value"),
            ("nnx.Variable", variable, "_trace_state"),
            ("nnx.Variable", variable, "_var_metadata"),
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
            'pip install "flax==0.12.8".'
        )


# A loop over hundreds of variables that Python runs itself would cost as much as a
# small step on the device.
_get_raw = operator.attrgetter("_raw_value")
