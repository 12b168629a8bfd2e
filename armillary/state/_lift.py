"""Turns code that mutates slots into a pure function, and back.

`State` is every slot that some roots reach, seen as one flat list of arrays. Lifting a
function is four steps: put other arrays (tracers) into the slots, run the function,
collect what the slots hold now, put the old arrays back. The objects themselves never
change hands, so every reference a user holds stays good.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from armillary.errors import StateStructureError
from armillary.state import _nnx
from armillary.state._find import Search
from armillary.state._place import PlaceSlot
from armillary.state._slots import Slot, describe
from armillary.state._watch import Watch

_MADE = "made by the step, so nothing carries it to the next one"
_NOTHING = object()


class State:
    """The slots that `roots` reach, read and written as one flat list of arrays.

    Args:
        roots: Pairs of an object (or function) to search, and its path.

    Attributes:
        slots: The slots, each place once.
        paths: The path of each array in the flat list.
        owners: The slot of each array in the flat list.
        places: The keys of the slots.
        ranges: For each slot: the slot, and the range of its arrays in the flat list.
    """

    def __init__(self, roots: Sequence[tuple[Any, str]]) -> None:
        self.roots = tuple(roots)
        search = self._search()
        self.slots: tuple[Slot, ...] = tuple(
            sorted(search.slots, key=lambda slot: slot.path)
        )
        self._nodes = search.nodes
        self._constants = search.constants
        self.paths = tuple(path for slot in self.slots for path in slot.paths)
        self.owners = tuple(slot for slot in self.slots for _ in slot.paths)
        stops = list(itertools.accumulate(len(slot.paths) for slot in self.slots))
        self.ranges = list(zip(self.slots, [0, *stops], stops, strict=False))
        self.places = frozenset(slot.key for slot in self.slots)
        self._watch = Watch(search.holders, self.places)

    def _search(self) -> Search:
        search = Search()
        for root, path in self.roots:
            search.visit(root, path)
        return search

    def is_current(self) -> bool:
        """Returns whether a new search would find the same; much faster than one."""
        return self._watch.is_current()

    def signature(self) -> tuple[Any, ...]:
        """Returns what a compiled program depends on, but for plain values."""
        return tuple(
            (
                slot.paths,
                slot.role,
                slot.annotations.get("aggregation"),
                slot.annotations.get("synchronization"),
                tuple((leaf.shape, leaf.dtype) for leaf in map(as_array, slot.read())),
            )
            for slot in self.slots
        )

    def changes_since(self, old: "State") -> set[str]:
        """Returns the paths of what is another than in `old`, but for arrays."""
        before = {s.key: s for s in old.slots if isinstance(s, PlaceSlot)}
        changes = self._watch.changes_since(old._watch)
        for slot in self.slots:
            if isinstance(slot, PlaceSlot) and slot.key in before:
                changes |= slot.changes_since(before[slot.key])
        return changes

    def read(self) -> list[Any]:
        """Returns the arrays that the slots hold."""
        return [leaf for slot in self.slots for leaf in slot.read()]

    def write(self, leaves: Sequence[Any], only: set[int] | None = None) -> None:
        """Puts `leaves` into the slots.

        Args:
            leaves: All arrays, in the order of `paths`.
            only: Indices of those that have changed, if that is known.
        """
        for slot, start, stop in self.ranges:
            if only is None or not only.isdisjoint(range(start, stop)):
                slot.write(list(leaves[start:stop]))

    @contextlib.contextmanager
    def swapped(self, leaves: Sequence[Any]) -> Iterator[None]:
        """Holds `leaves` in the slots for a while, in the current trace."""
        undo: list[Callable[[], None]] = []
        try:
            for slot, part in self._parts(leaves):
                undo.append(slot.swap(part))
            undo.extend(_nnx.swap_node(node) for node in self._nodes)
            yield
        finally:
            for restore in reversed(undo):
                restore()

    def collect(self, before: Sequence[Any], step_name: str) -> list[Any]:
        """Returns what the slots hold after a step that began with `before`.

        Args:
            before: The arrays that `swapped` put in.
            step_name: Name of the user's function, for the message.

        Returns:
            The arrays now, each with the shape and the strong dtype it had.

        Raises:
            StateStructureError: If the step changed a shape, a dtype, the structure of
                a slot or a plain number, or made a new slot. All changes are listed.
        """
        changes: list[str] = []
        leaves: list[Any] = []
        for slot, old in self._parts(before):
            try:
                new = slot.read()
            except StateStructureError as error:
                changes.extend(str(error).splitlines())
                continue
            for path, a, b in zip(slot.paths, old, new, strict=True):
                b = as_array(b)
                if (a.shape, a.dtype) != (b.shape, b.dtype):
                    changes.append(f"{path}: {describe(a)} became {describe(b)}")
            leaves.extend(strong(leaf) for leaf in new)
        now = self._search()
        beyond_slots = [*self._new_places(now), *self._changed_numbers(now)]
        if changes or beyond_slots:
            num_places = len(self.paths) + len(beyond_slots)
            changes.extend(beyond_slots)
            raise StateStructureError(_message(step_name, changes, num_places))
        return leaves

    def _new_places(self, now: Search) -> list[str]:
        """Returns what is wrong with the slots that a step made, and unmakes them."""
        changes: list[str] = []
        for slot in now.slots:
            if slot.key in self.places:
                continue
            if not isinstance(slot, PlaceSlot):
                changes.append(f"{slot.path}: {_MADE}")
                continue
            before = self._watch.held_at(slot.key, _NOTHING)
            changes.append(f"{slot.path}: {_describe_new(slot, before)}")
            # It holds a tracer, which would fail in another place, and say less there.
            if before is _NOTHING or before is slot.get():
                slot.remove()
            else:
                slot.put(before)
        return changes

    def _changed_numbers(self, now: Search) -> list[str]:
        return [
            f"{path}: {type(old).__name__} {old} became {now.constants[key][2]}, once, "
            "while the step was traced"
            for key, (path, _, old) in self._constants.items()
            # Flags and names are set, not counted: once is as good as every time.
            if isinstance(old, int | float) and not isinstance(old, bool)
            if key in now.constants and now.constants[key][2] is not old
            if now.constants[key][2] != old
        ]

    def _parts(self, leaves: Sequence[Any]) -> Iterator[tuple[Slot, list[Any]]]:
        for slot, start, stop in self.ranges:
            yield slot, list(leaves[start:stop])


def strong(leaf: Any) -> jax.Array:
    """Returns `leaf` as an array whose dtype does not give way in arithmetic."""
    array = as_array(leaf)
    if getattr(array, "weak_type", False):  # key arrays have no such attribute
        return jax.lax.convert_element_type(array, array.dtype)
    return array


def as_array(leaf: Any) -> jax.Array:
    """Returns `leaf` itself if it is a JAX array, so that identity tells changes."""
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def _describe_new(slot: PlaceSlot, before: Any) -> str:
    """Returns what a step did to a place that held no array `before`."""
    if before is _NOTHING:
        return _MADE
    if before is slot.get():
        kind = type(before).__name__
        return f"the step put an array into this {kind}, which held none before"
    arrays = slot.read()
    is_one = slot.paths == (slot.path,)
    became = describe(arrays[0]) if is_one else "a nest of arrays"
    return f"held `{before!r:.60}` before the step, and {became} after it"


def _message(step_name: str, changes: list[str], num_slots: int) -> str:
    lines = "\n".join(f"  {change}" for change in changes)
    return (
        f"`{step_name}` changed {len(changes)} of {num_slots} slots, and a compiled "
        "loop needs the same places with the same shape and dtype after every step:\n"
        f"{lines}\n"
        "Make every place in the constructor with its final shape and dtype (an array, "
        "`jnp.zeros(...)`, where it counts), and cast before assigning "
        "(`value.astype(jnp.float32)`)."
    )
