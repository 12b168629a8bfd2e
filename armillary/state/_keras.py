"""Slots in Keras variables: the only file that touches private attributes of Keras.

In Keras, a traced function can assign to any variable, and leaves a value of the trace
in it. `guarded_writes` refuses that. Keras takes seconds to import, so this file looks
for it among the modules that are loaded.
"""

import contextlib
import functools
import importlib
import operator
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import jax
from jax.core import Tracer

from armillary._optional import KERAS_ON_JAX
from armillary.state._slots import Role, Slot

if TYPE_CHECKING:
    import keras

# The role of a variable, by the value of `aggregation` that Keras sets.
_ROLES = {
    "sum": Role.METRIC,
    "mean": Role.BATCH_STATISTIC,
    "only_first_replica": Role.FIRST_REPLICA,
}
_SEED_NAME = "seed_generator_state"
# Attributes of Keras objects that are neither configuration nor derived from it.
_INTERNAL = frozenset(
    {
        *("_auto_config", "_build_shapes_dict", "_call_signature", "_called"),
        *("_compile_config", "_compiled_trainable_state", "_functional", "_tracker"),
        *("_inbound_nodes", "_inputs", "_inputs_struct", "_jax_state", "_loss_ids"),
        *("_jax_state_synced", "_losses", "_losses_override", "_nodes", "_path"),
        *("_nodes_by_depth", "_operations", "_operations_by_depth", "_outbound_nodes"),
        *("_outputs", "_outputs_struct", "_parent_path", "backend", "build", "history"),
        *("predict_function", "quantize", "test_function", "train_function"),
    }
)
# Lists of objects that other attributes hold as well. They are searched last, so that a
# variable gets the name of its attribute.
_STORES = (
    *("_layers", "_metrics", "_seed_generators"),
    *("_trainable_variables", "_non_trainable_variables", "_variables"),
)
_VARIABLE_ATTRIBUTES = (
    *("_trainable", "_constraint", "_regularizer", "_overwrite_with_gradient"),
)


class KerasSlot(Slot):
    def __init__(self, variable: "keras.Variable", path: str) -> None:
        super().__init__(variable, "_value", path, put=setattr)
        self.variable = variable
        self.key = id(variable)
        self.role = _ROLES.get(variable.aggregation, Role.PLAIN)
        if variable.name == _SEED_NAME:
            self.role = Role.RANDOM_KEY

    def is_parameter(self) -> bool:
        return self.variable.trainable


def keras_module() -> Any:
    module = sys.modules.get("keras")
    return module if hasattr(module, "Variable") else None


def follow_keras() -> None:
    """Makes `fit` of Keras run under the strategy of its model, if Keras is loaded."""
    if keras_module() is not None:
        importlib.import_module("armillary.keras._fit").follow()


def check_backend() -> None:
    """Raises if the loaded Keras does not run on JAX."""
    backend = sys.modules["keras"].config.backend()
    if backend != "jax":
        raise ImportError(
            f"Keras runs on the backend {backend!r}, but Armillary needs JAX. "
            f"{KERAS_ON_JAX}"
        )


def is_variable(value: Any) -> bool:
    return is_variable_type(type(value))


@functools.lru_cache(maxsize=4096)
def is_variable_type(kind: type) -> bool:
    return _is_on_jax(kind, ["Variable"])


@functools.lru_cache(maxsize=4096)
def is_node_type(kind: type) -> bool:
    return _is_on_jax(kind, _NODE_TYPES)


def batch_statistics(value: Any) -> "list[keras.Variable]":
    """Returns the variables of a layer that are means over batches."""
    # Keras declares no aggregation for them.
    if not is_node_type(type(value)):
        return []
    kind = sys.modules["keras"].layers.BatchNormalization
    return list(value.non_trainable_variables) if isinstance(value, kind) else []


def is_compiled_metrics(value: Any) -> bool:
    """Returns whether `value` holds the metrics that a model was compiled with."""
    return type(value).__name__ == "CompileMetrics" and is_node_type(type(value))


def is_unset(variable: "keras.Variable") -> bool:
    return getattr(variable, "_value", None) is None


def value_of(variable: "keras.Variable") -> Any:
    return variable._value


def set_value(variable: "keras.Variable", value: jax.Array) -> None:
    """Puts an array into a variable without moving it to another device."""
    variable._value = value


def visible_names(attributes: dict[str, Any]) -> list[str]:
    """Returns the attributes of a Keras object to search, in order."""
    is_optimizer = "_trainable_variables_indices" in attributes
    # An optimizer lists the variables that it trains, which belong to the model.
    hidden = {*_INTERNAL, "_trainable_variables"} if is_optimizer else _INTERNAL
    visible = [name for name in attributes if name not in hidden]
    own = [name for name in visible if name not in _STORES]
    stores = [name for name in _STORES if name in visible]
    return own + stores


def public_name(name: Any) -> Any:
    """Returns an attribute's name in paths: `kernel` for `_kernel`."""
    return name.lstrip("_") or name if isinstance(name, str) else name


def variable_attributes(variable: "keras.Variable") -> dict[str, Any]:
    return {name: getattr(variable, name) for name in _VARIABLE_ATTRIBUTES}


@contextlib.contextmanager
def guarded_writes(
    lifted: Collection[Any], explain: Callable[["keras.Variable"], Exception]
) -> Iterator[None]:
    """Refuses values of a trace in variables that are not lifted, in this thread."""
    if keras_module() is None:
        yield
        return
    _install_guard()
    before = _guards.stack
    _guards.stack = (*before, (lifted, explain))
    try:
        yield
    finally:
        _guards.stack = before


class _Guards(threading.local):
    stack: tuple[tuple[Collection[Any], Callable[..., Exception]], ...] = ()


_guards = _Guards()


@functools.cache
def _install_guard() -> None:
    """Makes `_direct_assign` check the guard of this thread, if there is one."""
    kind: Any = sys.modules["keras"].Variable
    assign = kind._direct_assign

    @functools.wraps(assign)
    def direct_assign(self: Any, value: Any) -> None:
        if _guards.stack and isinstance(value, Tracer):
            lifted, explain = _guards.stack[-1]
            if id(self) not in lifted:
                raise explain(self)
        assign(self, value)

    kind._direct_assign = direct_assign


_NODE_TYPES = (
    *("Operation", "Metric", "Optimizer", "Loss", "random.SeedGenerator"),
    *("optimizers.schedules.LearningRateSchedule", "regularizers.Regularizer"),
    "constraints.Constraint",
)


def _is_on_jax(kind: type, names: Collection[str]) -> bool:
    """Returns whether a class derives from one of these classes of Keras.

    Raises if it does, but Keras does not run on JAX.
    """
    keras = keras_module()
    if keras is None:
        return False
    types = tuple(operator.attrgetter(name)(keras) for name in names)
    if not issubclass(kind, types):
        return False
    check_backend()
    return True
