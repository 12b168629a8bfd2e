"""Turns code that mutates slots into a pure function, and back.

`State` is every slot that some roots reach, seen as one flat list of arrays. Lifting a
function is four steps: put other arrays (tracers) into the slots, run the function,
collect what the slots hold now, put the old arrays back. The objects themselves never
change hands, so every reference a user holds stays good.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from armillary._jax_compat import warn_if_untested
from armillary.errors import StateStructureError
from armillary.state import _nnx
from armillary.state._holders import ABSENT, Numbers
from armillary.state._slots import Slot, describe
from armillary.state._step_changes import changed_message, find_new_places
from armillary.state._walk import Walk
from armillary.state._watch import Watch, compare


class State:
    """The slots that `roots` reach, read and written as one flat list of arrays.

    Args:
        roots: Pairs of an object (or function) to search, and its path.
        reads: The attributes of the first root that steps have looked at so far, which
            grows with them. `None` if nobody keeps count: then everything matters.
        has_constants: Whether the globals of functions are constants, as in `jax.jit`,
            unless they lead to state.

    Attributes:
        slots: The slots, each place once.
        paths: The path of each array in the flat list.
        owners: The slot of each array in the flat list.
        ranges: For each slot: the slot, and the range of its arrays in the flat list.
    """

    def __init__(
        self,
        roots: Sequence[tuple[Any, str]],
        reads: set[str] | None = None,
        *,
        has_constants: bool = False,
    ) -> None:
        warn_if_untested()  # Every step begins here.
        self.roots, self._reads = tuple(roots), reads
        self._has_constants = has_constants
        self._walk = Walk(self.roots)
        # What the objects held when the code began that runs on other arrays now, and
        # when the last such code had ended: a walk takes long.
        self._before: list[Walk] = []
        self._after: Walk | None = None
        self.slots: tuple[Slot, ...] = tuple(
            sorted(self._walk.slots.values(), key=lambda slot: slot.path)
        )
        self._nodes = [
            node.value for node in self._walk.nodes.values() if _nnx.is_node(node.value)
        ]
        self.paths = tuple(path for slot in self.slots for path in slot.paths)
        self.owners = tuple(slot for slot in self.slots for _ in slot.paths)
        stops = list(itertools.accumulate(len(slot.paths) for slot in self.slots))
        self.ranges = list(zip(self.slots, [0, *stops], stops, strict=False))

    @property
    def _names(self) -> set[str] | None:
        """The attributes of the first root that matter; `None` for all."""
        return None if "__dict__" in (self._reads or ()) else self._reads

    @property
    def _constants(self) -> set[tuple[int, Any]]:
        return self._walk.globals if self._has_constants else set()

    @functools.cached_property
    def _watch(self) -> Watch:
        return Watch(self._walk, self._names, self._constants)

    def search_again(self) -> "State":
        """Returns what the same roots reach by now."""
        return State(self.roots, self._reads, has_constants=self._has_constants)

    def watch(self) -> None:
        """Begins to watch what the steps have looked at by now."""
        self.__dict__.pop("_watch", None)
        _ = self._watch

    def is_current(self) -> bool:
        """Returns whether a new search would find the same; much faster than one.

        What no step has looked at may differ, and so may what slots hold, which
        `Slot.read` and `Slot.holds_same_objects` tell.
        """
        return self._watch.is_current()

    def signature(self) -> tuple[Any, ...]:
        """Returns what a compiled program depends on, but for plain values."""
        return tuple(
            (
                type(slot),
                slot.paths,
                slot.role,
                slot.annotations.get("aggregation"),
                slot.annotations.get("synchronization"),
                tuple((leaf.shape, leaf.dtype) for leaf in map(as_array, slot.read())),
            )
            for slot in self.slots
        )

    def changes_since(self, old: "State") -> dict[str, str]:
        """Returns, by path, what is another than in `old`, but for arrays."""
        return compare(old._walk, self._walk, self._names, but=old._constants)

    def read(self) -> list[Any]:
        """Returns the arrays that the slots hold."""
        return [leaf for slot in self.slots for leaf in slot.read()]

    def write(self, leaves: Sequence[Any], only: set[int] | None = None) -> None:
        """Puts `leaves` into the slots."""
        for slot, start, stop in self.ranges:
            if only is None or not only.isdisjoint(range(start, stop)):
                slot.write(list(leaves[start:stop]))

    @contextlib.contextmanager
    def kept(self) -> Iterator[Callable[[], dict[str, str]]]:
        """Makes the objects hold what they held, if the code inside raises."""
        before = Walk(self.roots)
        self._before.append(before)
        if self._reads is None:
            self._keep_numbers(None)

        def changes() -> dict[str, str]:
            names = self._names
            if names is not None:
                names = names.union(_rebound(before))
            fixed = before.holding_slots()
            now, self._after = self._after or Walk(self.roots), None
            return compare(before, now, names, fixed)

        try:
            yield changes
        except BaseException:
            before.restore(before.reached_from(self._names))
            raise
        finally:
            self._before.pop()
            self._after = None

    def note_read(self, name: str) -> None:
        """Hears that a step is about to look at an attribute of the first root."""
        if self._reads is not None and name not in self._reads:
            self._reads.add(name)
            self._keep_numbers({name})

    def _keep_numbers(self, names: set[str] | None) -> None:
        for before in self._before:
            for holder in before.reached_from(names):
                for part in before.nodes[holder].parts:
                    if isinstance(part, Numbers):
                        part.keep(is_read=names is not None)

    @contextlib.contextmanager
    def swapped(
        self, leaves: Sequence[Any], *, is_kept: bool = False
    ) -> Iterator[None]:
        """Holds `leaves`, in the order of `paths`, in the slots for a while.

        They are held in the current trace. Plain values that change meanwhile stay
        changed, unless the code inside raises. Inside `kept`, its walk may serve here
        too (`is_kept`), where nobody goes on after an error.
        """
        undo: list[Callable[[], None]] = []
        with contextlib.nullcontext() if is_kept else self.kept():
            try:
                for slot, part in self._parts(leaves):
                    undo.append(slot.swap(part))
                undo.extend(_nnx.swap_node(node) for node in self._nodes)
                yield
            finally:
                for restore in reversed(undo):
                    restore()

    @contextlib.contextmanager
    def moved(self) -> Iterator[Callable[[], None]]:
        """Lets what may be changed here be changed in another trace for a while.

        Gets a function to call there.
        """
        variables = [s.variable for s in self.slots if isinstance(s, _nnx.NnxSlot)]
        variables = [each for each in variables if _nnx.is_here(each)]
        nodes = [node for node in self._nodes if _nnx.is_here(node)]
        undo: list[Callable[[], None]] = []

        def move() -> None:
            undo.extend(map(_nnx.move_variable, variables))
            undo.extend(map(_nnx.swap_node, nodes))

        try:
            yield move
        finally:
            for restore in reversed(undo):
                restore()

    def holds(self, value: Any) -> bool:
        """Returns whether `value` is an object with slots of this state."""
        return id(value) in self._ids

    @functools.cached_property
    def _ids(self) -> set[Any]:
        return {id(node) for node in self._nodes} | {slot.key for slot in self.slots}

    def move_new(self, other: "State") -> None:
        """Moves what `other` does not have into the current trace, to stay."""
        for slot in self.slots:
            if isinstance(slot, _nnx.NnxSlot) and not other.holds(slot.variable):
                _nnx.move_variable(slot.variable)
        for node in self._nodes:
            if not other.holds(node):
                _nnx.swap_node(node)

    def collect(
        self, before: Sequence[Any], step_name: str, *, is_end: bool = True
    ) -> list[Any]:
        """Returns what the slots hold after a step that began with `before`.

        Called inside `swapped`.
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
        new_places: list[str] = []
        if is_end:
            self._after = Walk(self.roots)
            new_places = find_new_places(self.slots, self._after, self._before[-1])
        if changes or new_places:
            num_places = len(self.paths) + len(new_places)
            changes.extend(new_places)
            raise StateStructureError(changed_message(step_name, changes, num_places))
        return leaves

    def _parts(self, leaves: Sequence[Any]) -> Iterator[tuple[Slot, list[Any]]]:
        for slot, start, stop in self.ranges:
            yield slot, list(leaves[start:stop])


def find_slots(root: Any, path: str = "") -> list[Slot]:
    """Returns every slot that `root` reaches, each place once, in a fixed order."""
    return list(State([(root, path)]).slots)


def strong(leaf: Any) -> jax.Array:
    """Returns `leaf` as an array whose dtype does not give way in arithmetic."""
    array = as_array(leaf)
    if getattr(array, "weak_type", False):  # key arrays have no such attribute
        return jax.lax.convert_element_type(array, array.dtype)
    return array


def as_array(leaf: Any) -> jax.Array:
    """Returns `leaf` itself if it is a JAX array, so that identity tells changes."""
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def _rebound(before: Walk) -> Iterator[str]:
    """Yields the attributes of the first root that hold another object by now."""
    for part in before.nodes[id(before.roots[0][0])].parts:
        names, values = part.look()
        now = dict(zip(names, values, strict=True))
        for name, value in part.held.items():
            if now.pop(name, ABSENT) is not value:
                yield name
        yield from now
