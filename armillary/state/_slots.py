"""Slots: the places in a user's objects that hold arrays.

A compiled function is pure, the user's objects are not. The bridge is the slot: one
place (a variable, an attribute, an item of a dict) whose arrays can be read, swapped
for tracers, and put back, while the object that owns the place stays the same object.
"""

import enum
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import jax

from armillary.typing import PyTree


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

    @abstractmethod
    def swap(self, leaves: list[Any]) -> Callable[[], None]:
        """Puts tracers into the place and returns a function that undoes it."""


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
        names = (
            getattr(entry, attribute)
            for attribute in ("key", "idx", "name")
            if hasattr(entry, attribute)
        )
        path = join(path, next(names, entry))
    return path


def describe(leaf: PyTree) -> str:
    """Returns dtype and shape of an array, or the type of anything else."""
    # The module `jax.numpy` has both names as well.
    if isinstance(getattr(leaf, "shape", None), tuple) and hasattr(leaf, "dtype"):
        return f"{leaf.dtype} {leaf.shape}"
    shown = repr(leaf)
    return f"{type(leaf).__name__} {shown[:60]}{'...' if len(shown) > 60 else ''}"
