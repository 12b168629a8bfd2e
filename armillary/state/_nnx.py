"""The adapter of Flax NNX: the only file that touches private attributes of Flax.

NNX refuses to mutate an object outside of the trace in which it was made. So lifting
moves variables and nodes into the trace of the step, and back. NNX takes longer to
import than all of Armillary, so this file imports it only for objects of NNX.
"""

import contextlib
import functools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from armillary.state._adapters import Adapter, NodePart
from armillary.state._holders import ATTRIBUTES, METADATA, part_of
from armillary.state._parts import Part
from armillary.state._slots import AxisNames, Hook, LeafKind, Role, Slot

if TYPE_CHECKING:
    from flax import nnx

_READ = "on_get_value"
_WRITE = "on_set_value"


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
        has_same_leaves = treedef.num_leaves == self.treedef.num_leaves
        return is_state and has_same_leaves

    def is_parameter(self) -> bool:
        from flax import nnx

        return isinstance(self.variable, nnx.Param)

    def axis_names(self) -> list[AxisNames | None]:
        found = axis_names_of(self.annotations) if self.is_single_array else None
        return [found] * len(self.paths)

    def is_of_optimizer(self) -> list[bool]:
        is_of_optimizer = _is_of_optimizer(self.variable)
        if self.is_single_array or is_of_optimizer:
            return [is_of_optimizer] * len(self.paths)
        # A variable may hold the whole state of a transformation of Optax.
        return super().is_of_optimizer()

    def swap(self, leaves: Sequence[Any]) -> Callable[[], None]:
        move_back = self.move()
        put_back = super().swap(leaves)

        def restore() -> None:
            put_back()
            move_back()

        return restore

    def is_here(self) -> bool:
        return self.variable._trace_state.is_valid()

    def move(self) -> Callable[[], None]:
        variable = self.variable
        trace_state = variable._trace_state
        object.__setattr__(variable, "_trace_state", _make_trace_state())
        return lambda: object.__setattr__(variable, "_trace_state", trace_state)

    def hook(self, on_read: Hook, on_write: Hook) -> Callable[[], None]:
        # NNX copies the hooks with the variable, so they also see reads and writes
        # inside its transformations.
        variable = self.variable
        before = {name: variable.get_metadata(name, None) for name in (_READ, _WRITE)}
        for name, hook in ((_READ, on_read), (_WRITE, on_write)):
            hooks = (*_as_tuple(before[name]), hook)
            variable.set_metadata(name, _chain(hooks))

        def restore() -> None:
            for name, old_hooks in before.items():
                if old_hooks is None:
                    variable.del_metadata(name)
                else:
                    variable.set_metadata(name, old_hooks)

        return restore


def axis_names_of(metadata: Mapping[str, Any]) -> AxisNames | None:
    """Returns the annotation of a variable for its sharding, if it has one."""
    # The first name is of Flax 0.12, and the others are of earlier releases.
    for name in ("out_sharding", "sharding_names", "sharding"):
        names = metadata.get(name)
        if names:
            rules = metadata.get("sharding_rules") or ()
            return AxisNames(tuple(names), tuple(rules))
    return None


def _chain(hooks: tuple[Callable[[Any, Any], Any], ...]) -> Callable[[Any, Any], Any]:
    """Joins several hooks into one, because older releases of Flax take only one."""

    def call(variable: Any, value: Any) -> Any:
        for hook in hooks:
            value = hook(variable, value)
        return value

    return call


def _as_tuple(hooks: Any) -> tuple[Any, ...]:
    if hooks is None:
        return ()
    if isinstance(hooks, tuple):
        return hooks
    return (hooks,)


class NnxAdapter(Adapter):
    name = "nnx"
    title = "Flax NNX"
    are_pytrees = True
    records_names = True
    attributes = ATTRIBUTES

    def leaves_placing(self) -> contextlib.AbstractContextManager[Any]:
        return _loaded("use_eager_sharding")(False)

    def is_variable_type(self, kind: type) -> bool:
        return issubclass(kind, _loaded("Variable"))

    def is_node_type(self, kind: type) -> bool:
        return issubclass(kind, _loaded("Pytree"))

    def make_slot(self, variable: "nnx.Variable", path: str) -> NnxSlot:
        return NnxSlot(variable, path)

    def parts_of_variable(self, variable: "nnx.Variable") -> list[Part]:
        return [part_of(variable._var_metadata, METADATA)]

    def read(self, variables: "Sequence[nnx.Variable]") -> list[Any]:
        return list(map(_get_raw, variables))

    def write(self, variables: "Sequence[nnx.Variable]", values: Iterable[Any]) -> None:
        if variables:
            from flax import nnx

            set_raw = vars(nnx.Variable)["_raw_value"].__set__
            deque(map(set_raw, variables, values), maxlen=0)

    def get(self, variable: "nnx.Variable") -> Any:
        return variable.get_value()

    def axis_names(self, variable: "nnx.Variable") -> AxisNames | None:
        return axis_names_of(variable.get_metadata())

    def kind_of(self, variable: "nnx.Variable", held_by: Any) -> LeafKind:
        role = _role_of(type(variable))
        if role is Role.METRIC and _is_welford_state(held_by):
            role = Role.PLAIN
        return LeafKind(role, variable.get_metadata().get("aggregation"))

    def is_of_optimizer(self, variable: "nnx.Variable") -> bool:
        return _is_of_optimizer(variable)

    def counts_updates(self, variable: "nnx.Variable") -> bool:
        from flax import nnx

        return isinstance(variable, nnx.OptState)

    def is_internal(self, name: Any) -> bool:
        return isinstance(name, str) and name.startswith("_pytree__")

    def roles_below(self, node: "nnx.Pytree", parts: Sequence[Part]) -> dict[int, Role]:
        if merges_by_sum(node):
            return {}
        # As metrics, the values would be added over replicas.
        return {id(value): Role.PLAIN for part in parts for value in part.values}

    def move(self, node: "nnx.Pytree") -> Callable[[], None]:
        state = node._pytree__state
        old = state._trace_state
        state._trace_state = _make_trace_state()

        def restore() -> None:
            state._trace_state = old
            # `nnx.grad` gives its nodes new state objects, made in a trace that has
            # ended.
            object.__setattr__(node, "_pytree__state", state)

        return restore

    def is_here(self, node: "nnx.Pytree") -> bool:
        return node._pytree__state._trace_state.is_valid()

    def assign(self, node: "nnx.Pytree", other: "nnx.Pytree") -> None:
        from flax import nnx

        nnx.update(node, nnx.state(other))

    def find_parameters(self, node: "nnx.Pytree") -> tuple[list[Any], Any]:
        from flax import nnx

        state = nnx.state(node, nnx.Param)
        return jax.tree.flatten(
            state, is_leaf=lambda part: isinstance(part, nnx.Variable)
        )

    def plays(self, kind: type, part: NodePart) -> bool:
        from flax import nnx

        bases = {
            NodePart.LAYER: nnx.Module,
            NodePart.METRIC: nnx.Metric,
            NodePart.OPTIMIZER: nnx.Optimizer,
        }
        return issubclass(kind, bases[part])

    def draw_counts(self, node: Any) -> "list[nnx.Variable]":
        from flax import nnx

        if not isinstance(node, nnx.Dropout) or not node.rngs:
            return []
        return [node.rngs.count]

    def explain_dtype(self, node: Any, compute: str) -> tuple[str, str] | None:
        from flax import nnx

        values = vars(node)
        dtype = values.get("dtype")
        # An embedding always has the dtype of its table, and multiplies nothing.
        is_open = dtype is None or isinstance(node, nnx.Embed)
        if is_open or jnp.dtype(dtype) == compute:
            return None
        # Others, such as a normalization, compute no products.
        parameters = [
            value for value in values.values() if isinstance(value, nnx.Param)
        ]
        held = map(self.value_of, parameters)
        has_matrix = any(getattr(value, "ndim", 0) > 1 for value in held)
        if not has_matrix:
            return None
        reason = f"`dtype={jnp.dtype(dtype).name}`"
        fix = (
            "Leave `dtype` out there. To keep a layer in float32, write `precision="
            '"highest"` instead of its `dtype`.'
        )
        return reason, fix

    def summarize(
        self, slots: Sequence[Slot], nodes: Iterable[Any]
    ) -> dict[Any, tuple[str, bool]]:
        del nodes
        return {
            slot.key: (type(slot.variable).__name__, slot.is_parameter())
            for slot in slots
        }


ADAPTER = NnxAdapter()


def _loaded(name: str) -> Any:
    """Returns a class of NNX, or no class if NNX is not loaded."""
    return getattr(sys.modules.get("flax.nnx"), name, ())


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


def _is_of_optimizer(variable: "nnx.Variable") -> bool:
    """Returns whether a variable holds a part of the state of Optax."""
    from flax import nnx

    # The step counter of an `nnx.Optimizer` itself has a different type.
    return isinstance(variable, nnx.OptArray | nnx.OptVariable)


def _is_welford_state(state: Any) -> bool:
    """Returns whether a `State` comes from `nnx.split` of a Welford metric."""
    from flax import nnx

    is_state = isinstance(state, nnx.State | dict)
    return is_state and {"count", "mean", "m2"} <= set(state.keys())


def merges_by_sum(value: Any) -> bool:
    """Returns whether the state of a metric on several replicas adds up."""
    from flax import nnx

    # Welford's algorithm has a running mean, which does not add up.
    return not isinstance(value, nnx.metrics.Welford)


def _make_trace_state() -> Any:
    from flax.nnx import tracers

    return tracers.TraceState()


# In C, because a Python loop over hundreds of variables would cost as much as a small
# step on the device.
_get_raw = operator.attrgetter("_raw_value")
