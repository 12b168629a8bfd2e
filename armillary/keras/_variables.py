"""The adapter of Keras: its variables and objects, as the state of a step.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jax.core import Tracer

from armillary._optional import loaded_keras
from armillary.advice._foreign_names import answer_attributes
from armillary.errors import StateStructureError
from armillary.keras._values import check_backend, is_unset, set_value
from armillary.state._adapters import Adapter
from armillary.state._holders import look_at_items, part_of
from armillary.state._parts import Contents, Part, Way, join
from armillary.state._slots import AxisNames, Role, Slot

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

    def axis_names(self) -> list[AxisNames | None]:
        layout = getattr(self.variable, "_layout", None)
        names = getattr(layout, "axes", None)
        spec = getattr(layout, "spec", names)
        found = AxisNames(tuple(spec)) if spec else None
        return [found] * len(self.paths)


def _look_at_attributes(source: dict[str, Any]) -> Contents:
    """Returns the attributes of a Keras object to search, in order."""
    is_optimizer = "_trainable_variables_indices" in source
    # An optimizer lists the variables that it trains, which belong to the model.
    hidden = {*_INTERNAL, "_trainable_variables"} if is_optimizer else _INTERNAL
    visible = [name for name in source if name not in hidden]
    own = [name for name in visible if name not in _STORES]
    stores = [name for name in _STORES if name in visible]
    names = own + stores
    return names, [source[name] for name in names]


def _look_at_variable(source: "keras.Variable") -> Contents:
    return look_at_items({name: getattr(source, name) for name in _VARIABLE_ATTRIBUTES})


def _join(path: str, name: Any) -> str:
    """Returns the path of an attribute, such as `dense/kernel` for `_kernel`."""
    public = name.lstrip("_") or name if isinstance(name, str) else name
    return join(path, public)


_ATTRIBUTES = Way(_look_at_attributes, put=operator.setitem, join=_join)
_VARIABLE = Way(_look_at_variable)


class KerasAdapter(Adapter):
    name = "keras"
    title = "Keras"
    attributes = _ATTRIBUTES

    def is_variable_type(self, kind: type) -> bool:
        return _is_on_jax(kind, ["Variable"])

    def is_node_type(self, kind: type) -> bool:
        return _is_on_jax(kind, _NODE_TYPES)

    def make_slot(self, variable: "keras.Variable", path: str) -> KerasSlot | None:
        return None if is_unset(variable) else KerasSlot(variable, path)

    def parts_of_variable(self, variable: "keras.Variable") -> list[Part]:
        return [part_of(variable, _VARIABLE)]

    def read(self, variables: "Sequence[keras.Variable]") -> list[Any]:
        return list(map(_get_value, variables))

    def write(
        self, variables: "Sequence[keras.Variable]", values: Iterable[Any]
    ) -> None:
        for variable, value in zip(variables, values, strict=True):
            set_value(variable, value)

    def name_of(self, variable: "keras.Variable") -> str:
        return variable.path

    def explain_creation(
        self, variable: "keras.Variable", step: str
    ) -> Exception | None:
        if not is_unset(variable):
            return None
        return StateStructureError(
            f"`{step}` makes the Keras variable `{variable.path}`, but a compiled "
            "program carries only variables that exist before it is traced. Make "
            "layers, metrics and optimizers outside of the step. Then build them: call "
            "the model with one batch (`model(batch)`), and then "
            "`optimizer.build(model.trainable_variables)`."
        )

    @contextlib.contextmanager
    def guarded_writes(
        self, lifted: Collection[Any], explain: Callable[[Any], Exception]
    ) -> Iterator[None]:
        if loaded_keras() is None:
            yield
            return
        _install_guard()
        before = _guards.stack
        refused: list[Exception] = []
        _guards.stack = (*before, (lifted, explain, refused))
        try:
            yield
        except Exception as error:
            if refused and error is not refused[0]:
                raise refused[0] from error
            raise
        finally:
            _guards.stack = before
        if refused:
            # A model that builds itself has caught the error, and has run without its
            # weights.
            raise refused[0]

    def roles_below(self, node: Any, parts: Sequence[Part]) -> dict[int, Role]:
        del parts
        # Keras declares no aggregation for the means over batches in a layer.
        if not isinstance(node, sys.modules["keras"].layers.BatchNormalization):
            return {}
        return dict.fromkeys(
            map(id, node.non_trainable_variables), Role.BATCH_STATISTIC
        )

    def explain_dtype(self, node: Any, compute: str) -> tuple[str, str] | None:
        if not isinstance(node, sys.modules["keras"].Layer) or not node.weights:
            return None
        fix = (
            f'For Keras, write `keras.config.set_dtype_policy("mixed_{compute}")` '
            "before you make the model, and leave `precision` out."
        )
        return f"the policy {node.dtype_policy.name!r}", fix

    def may_be_missing(self, node: Any) -> bool:
        # The metrics that a model was compiled with.
        return type(node).__name__ == "CompileMetrics"

    def summarize(
        self, slots: Sequence[Slot], nodes: Iterable[Any]
    ) -> dict[Any, tuple[str, bool]]:
        # The variables of the optimizer, metrics and seeds are left out.
        layer_type = sys.modules["keras"].Layer
        weights: set[int] = set()
        for node in nodes:
            if isinstance(node, layer_type):
                weights.update(map(id, node.weights))
        found = [slot for slot in slots if slot.key in weights]
        return {slot.key: ("weight", slot.role is Role.PLAIN) for slot in found}

    def follow_strategies(self) -> None:
        if loaded_keras() is not None:
            answer_names()
            importlib.import_module("armillary.keras._fit").follow()


ADAPTER = KerasAdapter()


# In C, because it runs for every variable at every loop.
_get_value = operator.attrgetter("_value")


class _Guards(threading.local):
    # The variables that may change, the error for others, and the errors so far.
    stack: tuple[
        tuple[Collection[Any], Callable[..., Exception], list[Exception]], ...
    ] = ()


_guards = _Guards()


@functools.cache
def answer_names() -> None:
    """Makes optimizers and metrics of Keras show the names to write instead of Flax'.

    A program may use such a name outside of Armillary's calls, for example in
    `Controller(global_step=optimizer.step)`.
    """
    keras = sys.modules["keras"]
    for kind in (keras.optimizers.Optimizer, keras.metrics.Metric):
        if not hasattr(kind, "__getattr__"):
            answer_attributes(kind)


@functools.cache
def _install_guard() -> None:
    """Makes `_direct_assign` check the guard of this thread, if there is one."""
    kind: Any = sys.modules["keras"].Variable
    assign = kind._direct_assign

    @functools.wraps(assign)
    def direct_assign(self: Any, value: Any) -> None:
        if _guards.stack and isinstance(value, Tracer):
            lifted, explain, refused = _guards.stack[-1]
            if id(self) not in lifted:
                error = explain(self)
                refused.append(error)
                raise error
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
    keras = loaded_keras()
    if keras is None:
        return False
    types = tuple(operator.attrgetter(name)(keras) for name in names)
    if not issubclass(kind, types):
        return False
    check_backend()
    return True
