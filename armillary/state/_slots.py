"""Slots: the places in a user's objects that hold arrays.

A compiled function is pure, the user's objects are not. The bridge is the slot: one
place (a variable, an attribute, an item of a dict) whose arrays can be read, swapped
for tracers, and put back, while the object that owns the place stays the same object.
"""

import enum
import functools
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from armillary._planned import is_planning
from armillary.errors import StateStructureError
from armillary.state._parts import join
from armillary.typing import PyTree

_LEAF = jax.tree.structure(0)
_TYPE = jax.ShapeDtypeStruct
PLAIN = frozenset(
    {
        *(str, bytes, int, float, complex, bool, type(None), type, slice, range),
        *(types.ModuleType, types.BuiltinFunctionType, types.CodeType),
        # A dead proxy raises an error for every operation, even for its class.
        *weakref.ProxyTypes,
    }
)
"""Types of values that hold no other values, and can be compared by `==`."""

ABSENT = type("Absent", (), {"__repr__": lambda _: "nothing"})()
"""The value of a place that does not exist."""

ANY_ARRAY = object()
"""Stands for an array in messages that do not describe it."""


# A look that begins at each level of a deep nest must not go to its end each time.
_MAX_LEVELS = 16
_MAX_LETTERS = 60  # of a value in a message


def are_plain(values: Iterable[object]) -> bool:
    """Returns whether none of many values is a holder or an array."""
    return PLAIN.issuperset(map(type, values))


def are_constant(values: Collection[object]) -> bool:
    """Returns whether many values are plain, or shallow tuples of plain values.

    For example, a list of files with their labels may have a million entries, so the
    loops over the values run in C.
    """
    return _are_nests_of_plain(values, (tuple,))


def hold_no_arrays(values: Collection[object]) -> bool:
    """Returns whether many values are plain, or shallow nests of plain values."""
    return _are_nests_of_plain(values, (tuple, list, dict))


def _are_nests_of_plain(values: Collection[object], nests: tuple[type, ...]) -> bool:
    """Returns whether values are plain, or nests of these types with plain values."""
    seen: set[int] = set()  # A list can hold itself.
    for _ in range(_MAX_LEVELS):
        kinds = set(map(type, values))
        if kinds <= PLAIN:
            return True
        if not kinds <= PLAIN.union(nests):
            return False

        contents: list[Iterable[Any]] = []
        for kind in kinds.intersection(nests):
            same: Any = values
            if len(kinds) > 1:
                same = [value for value in values if type(value) is kind]
            if kind is not tuple:
                # Every cycle leads through a list or a dictionary.
                same = _leave_out_seen(same, seen)
            if kind is dict:
                contents += map(dict.values, same)
            else:
                contents += same
        values = list(itertools.chain.from_iterable(contents))
    return False


def _leave_out_seen(values: Collection[Any], seen: set[int]) -> Collection[Any]:
    """Returns the values that are not in `seen`, and adds them there."""
    by_id = dict(zip(map(id, values), values, strict=True))
    for known in by_id.keys() & seen:
        del by_id[known]
    seen |= by_id.keys()
    return by_id.values()


def is_array(value: object) -> bool:
    """Returns whether a value is an array that a program can take.

    In a plan, it may be the type of an array.
    """
    kind = type(value)
    if kind is _TYPE:
        return is_planning()
    # `isinstance` with `jax.Array` runs Python code, and a walk checks every value.
    return _may_be_array(kind) and isinstance(value, jax.Array)


@functools.lru_cache(maxsize=4096)
def _may_be_array(kind: type) -> bool:
    return issubclass(kind, jax.Array | Tracer)


def is_equal(a: object, b: object) -> bool:
    """Returns whether two values make no difference to a program."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return _are_equal_arrays(np.asarray(a), np.asarray(b))
    if type(a).__hash__ is None and not isinstance(a, set):
        return False
    if type(a).__eq__ is object.__eq__:
        return False
    try:
        return bool(a == b)
    except Exception:  # the comparison is the user's code
        return False


def _are_equal_arrays(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # NaN is not equal to itself, but has the same bytes.
    return np.array_equal(a, b) or a.tobytes() == b.tobytes()


class Role(enum.Enum):
    """The purpose of a slot, if the library of its variable says so."""

    PLAIN = "plain"
    METRIC = "metric"
    BATCH_STATISTIC = "batch statistic"
    RANDOM_KEY = "random key"
    FIRST_REPLICA = "step counter"


class LeafKind(NamedTuple):
    """The role of one array, and the aggregation that a user gave for it, if any."""

    role: Role
    aggregation: Any = None


class AxisNames(NamedTuple):
    """The names that a model gives the axes of an array, to divide it over devices.

    Attributes:
        names: A name, several names or `None` for each axis.
        rules: Pairs of a name and an axis of the mesh that come with the array.
    """

    names: tuple[Any, ...]
    rules: tuple[tuple[str, Any], ...] = ()


class Trait(enum.Enum):
    """A property of a class whose state the library made."""

    ONE_LOOP = "armillary_one_loop"
    """Every loop resets the state, so that no checkpoint needs it."""

    HOLDS_STATE = "armillary_holds_state"
    """A class of this library, but not its subclasses, holds a user's objects."""

    IN_PARTS = "armillary_in_parts"
    """Elements carry into each other. A change is the difference of the elements."""

    MARKS_NOT_FINITE = "armillary_marks_not_finite"
    """The values are integers for floats. The last ones note values not finite."""


Hook: TypeAlias = Callable[[Any, Any], Any]
"""A function of a variable and its value, which returns the value to use instead."""

_Kind = TypeVar("_Kind", bound=type)


def with_trait(trait: Trait) -> Callable[[_Kind], _Kind]:
    """Returns a decorator that gives a class, and its subclasses, a trait."""

    def give(kind: _Kind) -> _Kind:
        setattr(kind, trait.value, True)
        return kind

    return give


def has_own_trait(kind: type, trait: Trait) -> bool:
    """Returns whether a class itself was given a trait, and not one of its bases."""
    return trait.value in vars(kind)


def has_trait(value: Any, trait: Trait) -> bool:
    return getattr(type(value), trait.value, False)


class Slot:
    """One place that holds an array, or a pytree with arrays.

    Only the arrays of the pytree may change. `stops_at` returns whether a part of the
    value is a slot or an object of its own, and `is_state` whether a leaf is an array
    to carry. `paths` has a path for each of these arrays.
    """

    variable: Any = None  # of a library, whose value this is
    holder: int | None = None  # the `id` of the object that has the place
    role: Role = Role.PLAIN

    def __init__(
        self,
        source: Any,
        name: Any,
        path: str,
        *,
        get: Callable[[Any, Any], Any] = object.__getattribute__,
        put: Callable[[Any, Any, Any], None] = object.__setattr__,
        stops_at: Callable[[Any], bool] | None = None,
        is_state: Callable[[Any], bool] = is_array,
    ) -> None:
        self.source = source
        self.name = name
        self.path = path
        self._get = get
        self._put = put
        self._stops_at = stops_at
        self.key: Hashable = (id(source), name)
        self.annotations: dict[str, Any] = {}

        value = self.get()
        if is_array(value):  # as nearly every variable
            entries = [((), value)]
            self.treedef = _LEAF
        else:
            entries, self.treedef = jax.tree_util.tree_flatten_with_path(
                value, is_leaf=stops_at
            )

        leaves = [leaf for _, leaf in entries]
        self._leaf_paths = self._name_leaves(entries)
        self._is_state = is_state
        self.is_dynamic = list(map(is_state, leaves))
        self._positions = [i for i, dynamic in enumerate(self.is_dynamic) if dynamic]
        self.paths = tuple(self._leaf_paths[i] for i in self._positions)
        # The leaves that are not arrays, with `None` in the place of each array.
        self._static = [None if is_state(leaf) else leaf for leaf in leaves]

        # JAX flattens much faster without a Python function to call.
        has_objects = stops_at is not None and any(map(stops_at, self._static))
        self._stops_at_if_any = stops_at if has_objects else None
        # JAX also calls a node without leaves, such as `optax.MaskedNode()`, a leaf.
        self.is_single_array = self.paths == (path,) and self.treedef == _LEAF

    def _name_leaves(self, entries: Sequence[tuple[Any, Any]]) -> list[str]:
        """Returns the paths of the leaves, from the keys that JAX gives them."""
        return [join_keys(self.path, keys) for keys, _ in entries]

    @property
    def others(self) -> list[tuple[str, Any]]:
        """The leaves that are not arrays, with their paths."""
        triples = zip(self._leaf_paths, self._static, self.is_dynamic, strict=True)
        return [(path, leaf) for path, leaf, dynamic in triples if not dynamic]

    def get(self) -> PyTree:
        """Returns the value of the place, or `ABSENT`."""
        try:
            return self._get(self.source, self.name)
        except (AttributeError, LookupError):
            return ABSENT

    def put(self, value: PyTree) -> None:
        self._put(self.source, self.name, value)

    def raw(self) -> Any:
        """Returns the value of the place, in a form that `is_same_raw` can compare."""
        value = self.get()
        if isinstance(value, jax.Array):
            return value
        leaves, treedef = jax.tree.flatten(value, is_leaf=self._stops_at_if_any)
        is_one_leaf = self.is_single_array and treedef == _LEAF
        return value if is_one_leaf else Held(treedef, leaves)

    def read(self) -> list[jax.Array]:
        """Returns the arrays, in the order of `paths`."""
        value = self.get()
        if self.is_single_array and isinstance(value, jax.Array):
            return [value]
        leaves, treedef = jax.tree.flatten(value, is_leaf=self._stops_at)
        if treedef != self.treedef and not self._is_alike(value, treedef):
            change = f"{self.path}: tree structure {self.treedef} became {treedef}"
            raise StateStructureError(change, changes=[change])
        changes = self._find_changes(leaves)
        if changes:
            raise StateStructureError("\n".join(changes), changes=changes)
        return [leaves[i] for i in self._positions]

    def _find_changes(self, leaves: Sequence[Any]) -> list[str]:
        """Returns a line for each leaf that only a new search could carry."""
        rows = zip(self._leaf_paths, self.is_dynamic, self._static, leaves, strict=True)
        changes: list[str] = []
        for path, was_array, old, new in rows:
            is_kept = was_array or self._is_same(old, new)
            has_other_kind = was_array != self._is_state(new)
            if has_other_kind or not is_kept:
                before = ANY_ARRAY if was_array else old
                changes.append(f"{path}: {became(before, new)}")
        return changes

    def _is_alike(self, value: Any, treedef: Any) -> bool:
        """Returns whether a new structure counts as the one that was found."""
        del value, treedef
        return False

    def write(self, leaves: Sequence[Any]) -> None:
        """Puts other arrays into the place, in the order of `paths`."""
        values = list(self._static)
        for position, leaf in zip(self._positions, leaves, strict=True):
            values[position] = leaf
        value = values[0] if self.is_single_array else self.treedef.unflatten(values)
        self.put(value)

    def replace(self, raw: Any, leaves: Mapping[int, Any]) -> Any:
        """Puts other arrays into the place; returns the new result of `raw`."""
        if not isinstance(raw, Held):
            self.put(leaves[0])
            return leaves[0]
        # Flattening hundreds of leaves again would cost as much as a small step.
        values = list(raw.leaves)
        for index, leaf in leaves.items():
            values[self._positions[index]] = leaf
        self.put(raw.treedef.unflatten(values))
        return Held(raw.treedef, values)

    def swap(self, leaves: Sequence[Any]) -> Callable[[], None]:
        """Puts tracers into the place and returns a function that undoes it."""
        old = self.get()
        self.write(leaves)
        return lambda: self.put(old)

    def is_here(self) -> bool:
        """Returns whether the place belongs to the current trace, as in NNX."""
        return False

    def move(self) -> Callable[[], None]:
        """Moves the place into the current trace; returns a function that undoes it."""
        return lambda: None

    def hook(self, on_read: Hook, on_write: Hook) -> Callable[[], None]:
        """Calls hooks at each read and write; returns a function that removes them.

        Only a library whose variables have hooks does this. A variable of another
        library is read and written as before.
        """
        del on_read, on_write
        return lambda: None

    def kinds(self) -> list[LeafKind]:
        """Returns the kind of each array, in the order of `paths`."""
        kind = LeafKind(self.role, self.annotations.get("aggregation"))
        return [kind] * len(self.paths)

    def axis_names(self) -> list[AxisNames | None]:
        """Returns the annotation of each array for its sharding, if it has one."""
        return [None] * len(self.paths)

    def display_names(self) -> list[str]:
        """Returns the arrays' names in messages, in the order of `paths`."""
        return list(self.paths)

    def is_parameter(self) -> bool:
        """Returns whether the slot is a variable of a kind that is trained."""
        return False

    def is_of_optimizer(self) -> list[bool]:
        """Returns, for each array, whether it is part of an optimizer's state."""

        def is_part(value: Any) -> bool:
            return self._is_own(value) or is_optax_state(value)

        flags: list[bool] = []
        for part in jax.tree.leaves(self.get(), is_leaf=is_part):
            leaves = jax.tree.leaves(part, is_leaf=self._stops_at)
            num_arrays = sum(map(self._is_state, leaves))
            flags += [is_optax_state(part)] * num_arrays
        return flags

    def _is_own(self, value: Any) -> bool:
        return self._stops_at is not None and self._stops_at(value)

    def _is_same(self, old: Any, new: Any) -> bool:
        if old is new:
            return True
        # Two equal objects may hold different arrays.
        return not self._is_own(old) and is_equal(old, new)


class Held(NamedTuple):
    """The structure and the leaves of a container that can be changed in place."""

    treedef: Any
    leaves: list[Any]


def is_same_raw(a: Any, b: Any) -> bool:
    """Returns whether a place was left alone between two calls of `Slot.raw`."""
    are_containers = isinstance(a, Held) and isinstance(b, Held)
    if not are_containers:
        return a is b
    return a.treedef == b.treedef and all(map(operator.is_, a.leaves, b.leaves))


def join_keys(path: str, keys: Iterable[Any]) -> str:
    """Returns the path of a leaf, from the keys that JAX gives it, below `path`."""
    for entry in keys:
        path = join(path, _name_of(entry))
    return path


def _name_of(entry: Any) -> Any:
    """Returns the name or index in a key of JAX, or the key itself."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry


def describe(leaf: PyTree) -> str:
    # The module `jax.numpy` has both names as well, but its `shape` is a function.
    has_shape = isinstance(getattr(leaf, "shape", None), tuple)
    if has_shape and hasattr(leaf, "dtype"):
        return f"{leaf.dtype} {leaf.shape}"
    shown = repr(leaf)
    if len(shown) > _MAX_LETTERS:
        shown = f"{shown[:_MAX_LETTERS]}..."
    return f"{type(leaf).__name__} {shown}"


def became(old: Any, new: Any) -> str:
    """Returns a text on the old and new value; types if the values look the same."""
    before = "an array" if old is ANY_ARRAY else describe(old)
    now = describe(new)
    if before == now and type(old) is type(new):
        now = "another value"
    elif before == now:
        before = f"{before} in {_type_name(old)}"
        now = f"{now} in {_type_name(new)}"
    return f"{before} became {now}"


def _type_name(value: Any) -> str:
    return "a `jax.Array`" if is_array(value) else f"`{type(value).__name__}`"


def is_optax_state(value: Any) -> bool:
    """Returns whether a value is one of Optax' tuples."""
    kind = type(value)
    return issubclass(kind, tuple) and kind.__module__.partition(".")[0] == "optax"
