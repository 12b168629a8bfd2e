"""Adapters: one for each library of variables, such as Flax NNX and Keras.

The rest of Armillary asks an adapter about the objects of a library, and names no
library itself. `register` lists a library with the module of its adapter. That module
is imported when a walk meets the first object of the library, because most programs use
one library, and some libraries take seconds to import.
"""

import contextlib
import enum
import functools
import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

# `import armillary` reads this module, so it must not import JAX.
if TYPE_CHECKING:
    from armillary.state._parts import Part, Way
    from armillary.state._slots import AxisNames, LeafKind, Role, Slot

# The module of the adapter, by the name of the library. If an object belongs to two
# libraries, the first one counts.
_MODULES: dict[str, str] = {}


class NodePart(enum.Enum):
    """The part that a node plays in a program, as advice and checks need it."""

    LAYER = "a layer whose plain attributes describe it"
    METRIC = "a metric with `reset` and `compute`"
    OPTIMIZER = "an optimizer that ignores an assigned learning rate"


class Adapter:
    """Answers questions about the objects of one library.

    A *variable* holds an array or a pytree of arrays. A *node* is any other object of
    the library that can hold variables, such as a layer.

    Attributes:
        name: The name of the library in code.
        title: The name of the library in sentences.
        are_pytrees: Whether variables and nodes are nodes of pytrees, so that functions
            take and return them as values. Otherwise, they are leaves.
        records_names: Whether the attributes of a node include a record of their names.
        attributes: How a node holds its attributes.
    """

    name: str
    title: str
    are_pytrees = False
    records_names = False
    attributes: "Way"

    def is_variable_type(self, kind: type) -> bool:
        """Returns whether instances of a class are variables of this library."""
        raise NotImplementedError

    def is_node_type(self, kind: type) -> bool:
        """Returns whether instances of a class are nodes of this library."""
        raise NotImplementedError

    def make_slot(self, variable: Any, path: str) -> "Slot | None":
        """Returns the slot of a variable, or `None` if it has no value yet."""
        raise NotImplementedError

    def parts_of_variable(self, variable: Any) -> "list[Part]":
        """Returns the parts of a variable other than its value."""
        raise NotImplementedError

    def read(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the values of many variables, in one pass."""
        raise NotImplementedError

    def write(self, variables: Sequence[Any], values: Iterable[Any]) -> None:
        """Puts values into many variables, and moves none to another device."""
        raise NotImplementedError

    def value_of(self, variable: Any) -> Any:
        """Returns the value of a variable, and runs no code of the user's."""
        [value] = self.read([variable])
        return value

    def get(self, variable: Any) -> Any:
        """Returns the value of a variable as its user sees it."""
        return self.value_of(variable)

    def name_of(self, variable: Any) -> str:
        """Returns the name that the library itself gave a variable."""
        raise NotImplementedError

    def kind_of(self, variable: Any, held_by: Any) -> "LeafKind":
        """Returns the kind of a variable that is a node of a pytree."""
        raise NotImplementedError

    def axis_names(self, variable: Any) -> "AxisNames | None":
        """Returns the annotation of a variable that is a node of a pytree."""
        del variable
        return None

    def is_of_optimizer(self, variable: Any) -> bool:
        """Returns whether a variable holds a part of an optimizer's state."""
        del variable
        return False

    def counts_updates(self, variable: Any) -> bool:
        """Returns whether a variable counts the updates of an optimizer."""
        del variable
        return False

    def explain_creation(self, variable: Any, step: str) -> Exception | None:
        """Returns the error for a variable that a step makes, if it is one."""
        del variable, step
        return None

    def guarded_writes(
        self, lifted: Collection[Any], explain: Callable[[Any], Exception]
    ) -> contextlib.AbstractContextManager[None]:
        """Refuses values of a trace in variables that are not lifted, in this thread.

        Args:
            lifted: The `id`s of the variables that are lifted.
            explain: Returns the error for a variable that is not.
        """
        del lifted, explain
        return contextlib.nullcontext()

    def is_internal(self, name: Any) -> bool:
        """Returns whether an attribute of a node belongs to the library alone."""
        del name
        return False

    def roles_below(self, node: Any, parts: "Sequence[Part]") -> "dict[int, Role]":
        """Returns the roles that a node gives variables that it holds, by `id`."""
        del node, parts
        return {}

    def move(self, node: Any) -> Callable[[], None]:
        """Moves a node into the current trace; returns a function that undoes it."""
        raise NotImplementedError

    def is_here(self, node: Any) -> bool:
        """Returns whether a node may be changed in the current trace."""
        raise NotImplementedError

    def assign(self, node: Any, other: Any) -> None:
        """Puts the values of one node into another with the same structure."""
        raise NotImplementedError

    def find_parameters(self, node: Any) -> tuple[list[Any], Any] | None:
        """Returns the parameters of a node, and the structure of their gradients.

        Returns `None` if a function cannot be differentiated by the node as a whole.
        """
        del node
        return None

    def may_be_missing(self, node: Any) -> bool:
        """Returns whether a node exists at some saves only."""
        del node
        return False

    def plays(self, kind: type, part: NodePart) -> bool:
        """Returns whether nodes of a class play a part in a program."""
        del kind, part
        return False

    def explain_dtype(self, node: Any, compute: str) -> tuple[str, str] | None:
        """Returns the reason why a layer has a dtype of its own, and the fix.

        Returns `None` if the layer leaves its dtype open, or computes in `compute`.
        """
        del node, compute

    def draw_counts(self, node: Any) -> list[Any]:
        """Returns the variables that count the draws of a dropout layer."""
        del node
        return []

    def summarize(
        self, slots: Sequence["Slot"], nodes: Iterable[Any]
    ) -> dict[Any, tuple[str, bool]]:
        """Returns rows for a table of a model's arrays, by the key of each slot.

        A row has a kind, and whether the array is a parameter. Variables that are not
        part of the model are left out.
        """
        raise NotImplementedError

    def follow_strategies(self) -> None:
        """Makes the loops of the library run under the strategy in effect."""

    def leaves_placing(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which new variables are not placed by annotations."""
        return contextlib.nullcontext()


def register(library: str, module: str) -> None:
    """Lists a library, and the module that holds its `ADAPTER`."""
    _MODULES[library] = module


def loaded_adapters() -> list[Adapter]:
    """Returns the adapters of the libraries that the program has imported."""
    return [_import(module) for name, module in _MODULES.items() if name in sys.modules]


def _import(module: str) -> Adapter:
    return importlib.import_module(module).ADAPTER


def _adapters_of(kind: type) -> Iterator[Adapter]:
    """Yields the adapters of the libraries that a class derives from."""
    modules = [getattr(base, "__module__", None) for base in kind.__mro__]
    names = {name.partition(".")[0] for name in modules if isinstance(name, str)}
    for library, module in _MODULES.items():
        if library in names:
            yield _import(module)


@functools.lru_cache(maxsize=4096)
def variable_adapter(kind: type) -> Adapter | None:
    """Returns the adapter for variables of a class; `None` for other classes."""
    found = (
        adapter for adapter in _adapters_of(kind) if adapter.is_variable_type(kind)
    )
    return next(found, None)


@functools.lru_cache(maxsize=4096)
def node_adapter(kind: type) -> Adapter | None:
    """Returns the adapter for nodes of a class; `None` for other classes."""
    found = (adapter for adapter in _adapters_of(kind) if adapter.is_node_type(kind))
    return next(found, None)


@functools.lru_cache(maxsize=4096)
def is_object_type(kind: type) -> bool:
    """Returns whether instances of a class are variables or nodes of a library."""
    return variable_adapter(kind) is not None or node_adapter(kind) is not None


def is_variable(value: Any) -> bool:
    """Returns whether a value is a variable of any library."""
    # Not `isinstance`, which would run code of a library for every value in a walk.
    return variable_adapter(type(value)) is not None


def is_tree_variable(value: Any) -> bool:
    """Returns whether a value is a variable that is a node of pytrees."""
    return _is_tree_variable_type(type(value))


@functools.lru_cache(maxsize=4096)
def _is_tree_variable_type(kind: type) -> bool:
    adapter = variable_adapter(kind)
    return adapter is not None and adapter.are_pytrees


def is_leaf_variable(value: Any) -> bool:
    """Returns whether a value is a variable that is a leaf of pytrees."""
    return is_variable(value) and not is_tree_variable(value)


def is_tree_node(value: Any) -> bool:
    """Returns whether a value is a node of a library that is a node of pytrees."""
    return _is_tree_node_type(type(value))


@functools.lru_cache(maxsize=4096)
def _is_tree_node_type(kind: type) -> bool:
    adapter = node_adapter(kind)
    return adapter is not None and adapter.are_pytrees


def adapter_of(value: Any) -> Adapter:
    """Returns the adapter of a variable or a node."""
    kind = type(value)
    found = variable_adapter(kind) or node_adapter(kind)
    assert found is not None
    return found


def plays(value: Any, part: NodePart) -> bool:
    """Returns whether a value is a node that plays a part in a program."""
    kind = type(value)
    adapter = node_adapter(kind)
    return adapter is not None and adapter.plays(kind, part)


def value_of(variable: Any) -> Any:
    """Returns the value of a variable, and runs no code of the user's."""
    return adapter_of(variable).value_of(variable)


def counts_updates(variable: Any) -> bool:
    """Returns whether a value is a variable that counts an optimizer's updates."""
    adapter = variable_adapter(type(variable))
    return adapter is not None and adapter.counts_updates(variable)


@contextlib.contextmanager
def guarded_writes(
    lifted: Collection[Any], explain: Callable[[Any], Exception]
) -> Iterator[None]:
    """Calls `Adapter.guarded_writes` for every library that is loaded."""
    with contextlib.ExitStack() as stack:
        for adapter in loaded_adapters():
            stack.enter_context(adapter.guarded_writes(lifted, explain))
        yield


def follow_strategies() -> None:
    """Makes the loops of all loaded libraries run under the strategy in effect."""
    for adapter in loaded_adapters():
        adapter.follow_strategies()


@contextlib.contextmanager
def leaves_placing() -> Iterator[None]:
    """Calls `Adapter.leaves_placing` for every library that is loaded."""
    with contextlib.ExitStack() as stack:
        for adapter in loaded_adapters():
            stack.enter_context(adapter.leaves_placing())
        yield
