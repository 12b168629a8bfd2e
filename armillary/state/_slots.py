"""Slots: the places in a user's objects that hold arrays.

A compiled function is pure, the user's objects are not. The bridge is the slot: one
place (a variable, an attribute, an item of a dict) whose arrays can be read, swapped
for tracers, and put back, while the object that owns the place stays the same object.
"""

import enum
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from armillary.errors import StateStructureError
from armillary.state._opaque import ABSENT, is_array, is_equal
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.state._holders import Part


class Role(enum.Enum):
    """What a slot is for, as far as its library says so."""

    PLAIN = "plain"
    METRIC = "metric"
    BATCH_STATISTIC = "batch statistic"
    RANDOM_KEY = "random key"
    FIRST_REPLICA = "step counter"


class Slot(ABC):
    """One place that holds arrays.

    Attributes:
        path: Where the place is, from the root of the search, such as `model/kernel`.
        paths: One path per array of the place. Most places hold one array, and then
            this is `(path,)`; an attribute that holds a pytree has one for each leaf.
        key: Equal for two slots exactly if they are the same place.
        holder: The `id` of the object that has the place; `None` for a variable.
        role: What the slot is for.
        annotations: What the user set on the variable, such as `aggregation`.
    """

    path: str
    paths: tuple[str, ...]
    key: Hashable
    holder: int | None = None
    role: Role = Role.PLAIN
    annotations: dict[str, Any]

    @abstractmethod
    def raw(self) -> Any:
        """Returns what the place holds, for `is_same_raw` to tell if it changes."""

    @abstractmethod
    def read(self) -> list[jax.Array]:
        """Returns the arrays, in the order of `paths`."""

    @abstractmethod
    def write(self, leaves: list[Any]) -> None:
        """Puts other arrays into the place, in the order of `paths`."""

    @abstractmethod
    def swap(self, leaves: list[Any]) -> Callable[[], None]:
        """Puts tracers into the place and returns a function that undoes it."""

    def replace(self, raw: Any, leaves: Mapping[int, Any]) -> Any:
        """Puts other arrays into the place; returns what `raw` then returns."""
        del raw
        values = self.read()
        for index, leaf in leaves.items():
            values[index] = leaf
        self.write(values)
        return self.raw()

    def holds_same_objects(self) -> bool:
        """Returns whether the objects beside the arrays are those that were found."""
        return True

    def is_of_optimizer(self) -> list[bool]:
        """Returns, for each array, whether it is part of an optimizer's state."""
        return [False] * len(self.paths)


class PlaceSlot(Slot):
    """An attribute or item whose value is a pytree with arrays.

    A step changes such a place by rebinding it: `self.params = new_params`. The arrays
    of the value are swapped, everything else in it must stay as it is.

    Attributes:
        treedef: The structure of the value.
        is_dynamic: For each leaf, whether it is an array.
        others: The leaves that are no arrays, with their paths.
    """

    def __init__(
        self, part: "Part", name: Any, path: str, is_leaf: Callable[[Any], bool]
    ) -> None:
        self.source, self.name, self.path = part.source, name, path
        self._kind = part.kind
        self.key = (id(part.source), name)
        self.annotations = {}
        self._is_leaf = is_leaf
        entries, self.treedef = jax.tree_util.tree_flatten_with_path(
            self.get(), is_leaf=is_leaf
        )
        self.is_dynamic = [is_array(leaf) for _, leaf in entries]
        self._leaf_paths = [join_keys(path, keys) for keys, _ in entries]
        self._positions = [i for i, dynamic in enumerate(self.is_dynamic) if dynamic]
        self.paths = tuple(self._leaf_paths[i] for i in self._positions)
        # The leaves that are no arrays, and `None` in place of those that are.
        self._static = [None if is_array(leaf) else leaf for _, leaf in entries]
        # JAX looks for leaves of its own much faster if it need not ask.
        self._is_leaf_if_any = is_leaf if any(map(is_leaf, self._static)) else None

    @property
    def others(self) -> list[tuple[str, Any]]:
        triples = zip(self._leaf_paths, self._static, self.is_dynamic, strict=True)
        return [(path, leaf) for path, leaf, dynamic in triples if not dynamic]

    def get(self) -> PyTree:
        """Returns what the place holds, or `ABSENT`."""
        try:
            return self._kind.get(self.source, self.name)
        except (AttributeError, LookupError):
            return ABSENT

    def put(self, value: PyTree) -> None:
        """Makes the place hold `value`."""
        assert self._kind.put is not None
        self._kind.put(self.source, self.name, value)

    def raw(self) -> Any:
        value = self.get()
        if isinstance(value, jax.Array):
            return value
        leaves, treedef = jax.tree.flatten(value, is_leaf=self._is_leaf_if_any)
        return Held(treedef, leaves)

    def read(self) -> list[jax.Array]:
        leaves, treedef = jax.tree.flatten(self.get(), is_leaf=self._is_leaf)
        if treedef != self.treedef:
            raise StateStructureError(
                f"{self.path}: tree structure {self.treedef} became {treedef}"
            )
        rows = zip(self._leaf_paths, self.is_dynamic, self._static, leaves, strict=True)
        changes = [
            f"{path}: {'an array' if dynamic else describe(old)} became {describe(new)}"
            f"{_hint(old)}"
            for path, dynamic, old, new in rows
            if dynamic != is_array(new) or not (dynamic or is_equal(old, new))
        ]
        if changes:
            raise StateStructureError("\n".join(changes))
        return [leaves[i] for i in self._positions]

    def write(self, leaves: list[Any]) -> None:
        values = list(self._static)
        for position, leaf in zip(self._positions, leaves, strict=True):
            values[position] = leaf
        self.put(self.treedef.unflatten(values))

    def replace(self, raw: Any, leaves: Mapping[int, Any]) -> Any:
        if not isinstance(raw, Held):
            self.put(leaves[0])
            return leaves[0]
        # To look at hundreds of leaves again would cost as much as a small step.
        values = list(raw.leaves)
        for index, leaf in leaves.items():
            values[self._positions[index]] = leaf
        self.put(raw.treedef.unflatten(values))
        return Held(raw.treedef, values)

    def holds_same_objects(self) -> bool:
        # An object that is equal to another may hold other arrays.
        now = jax.tree.leaves(self.get(), is_leaf=self._is_leaf)
        pairs = zip(self._static, now, strict=False)
        return all(old is new for old, new in pairs if self._is_leaf(old))

    def is_of_optimizer(self) -> list[bool]:
        def is_part(value: Any) -> bool:
            return self._is_leaf(value) or _is_optax_state(value)

        return [
            _is_optax_state(part)
            for part in jax.tree.leaves(self.get(), is_leaf=is_part)
            for leaf in jax.tree.leaves(part, is_leaf=self._is_leaf)
            if is_array(leaf)
        ]

    def swap(self, leaves: list[Any]) -> Callable[[], None]:
        old = self.get()
        self.write(leaves)
        return lambda: self.put(old)


class Held(NamedTuple):
    """What a place holds in a container, which may be changed from within."""

    treedef: Any
    leaves: list[Any]


def is_same_raw(a: Any, b: Any) -> bool:
    """Returns whether a place was left alone between two calls of `Slot.raw`."""
    if not (isinstance(a, Held) and isinstance(b, Held)):
        return a is b
    return a.treedef == b.treedef and all(map(operator.is_, a.leaves, b.leaves))


def join(path: str, name: object) -> str:
    """Returns the path of `name` below `path`."""
    return f"{path}/{name}" if path else str(name)


def join_keys(path: str, keys: Iterable[Any]) -> str:
    """Returns the path of a leaf, from the keys that JAX gives it, below `path`."""
    for entry in keys:
        kinds = (kind for kind in ("key", "idx", "name") if hasattr(entry, kind))
        path = join(path, getattr(entry, next(kinds, ""), entry))
    return path


def describe(leaf: PyTree) -> str:
    """Returns dtype and shape of an array, or the type of anything else."""
    # The module `jax.numpy` has both names as well.
    if isinstance(getattr(leaf, "shape", None), tuple) and hasattr(leaf, "dtype"):
        return f"{leaf.dtype} {leaf.shape}"
    shown = repr(leaf)
    return f"{type(leaf).__name__} {shown[:60]}{'...' if len(shown) > 60 else ''}"


def _hint(old: Any) -> str:
    if not isinstance(old, int | float) or isinstance(old, bool):
        return ""
    return f", once, while the step was traced: begin with `jnp.asarray({old})`"


def _is_optax_state(value: Any) -> bool:
    kind = type(value)
    return issubclass(kind, tuple) and kind.__module__.partition(".")[0] == "optax"
