"""Turns code that mutates slots into a pure function, and back.

Lifting a function is four steps: put other arrays (tracers) into the slots, run the
function, collect the new arrays from the slots, put the old arrays back. The user's
objects stay the same objects. Other changes that Python made to them are not undone,
as under `jax.jit`.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from armillary._checks import list_lines
from armillary._jax_compat import warn_if_untested
from armillary.errors import StateStructureError
from armillary.state._adapters import adapter_of, is_tree_node
from armillary.state._differences import find_differences, find_facts
from armillary.state._holders import ATTRIBUTES
from armillary.state._slots import ABSENT, AxisNames, LeafKind, Slot, describe
from armillary.state._walk import Node, Walk, by_path, slots_of
from armillary.state._watch import CodeWatch, Watch


class State:
    """The slots that `roots` reach, read and written as one flat list of arrays.

    `reads` holds the attributes of the first root that steps have read so far. Every
    step may add some. If it is `None`, nobody records the reads, and every attribute
    counts. `functions` are the functions that a program consists of: the values that
    their code reads by name are watched, too.
    """

    def __init__(
        self,
        roots: Sequence[tuple[Any, str]],
        reads: set[str] | None = None,
        functions: Collection[Callable[..., Any]] = (),
    ) -> None:
        warn_if_untested()  # Every step begins here.
        self.roots = tuple(roots)
        self._reads = reads
        self._functions = functions
        self._walk = Walk(self.roots)
        self.slots: tuple[Slot, ...] = tuple(by_path(self._walk.slots.values()))
        self._walk.forget_arrays()
        # The nodes of some libraries belong to a trace, as their variables do.
        objects = [node.value for node in self._walk.nodes.values()]
        self._nodes = [value for value in objects if is_tree_node(value)]

        # The path and the slot of each array, and the range of each slot's arrays.
        self.paths = tuple(path for slot in self.slots for path in slot.paths)
        self.owners = tuple(slot for slot in self.slots for _ in slot.paths)
        counts = [len(slot.paths) for slot in self.slots]
        stops = list(itertools.accumulate(counts))
        starts = [0, *stops]
        # There is one start more than ranges.
        self.ranges = list(zip(self.slots, starts, stops, strict=False))

    @functools.cached_property
    def kinds(self) -> tuple[LeafKind, ...]:
        """The role of each array, in the order of `paths`."""
        return tuple(kind for slot in self.slots for kind in slot.kinds())

    @property
    def of_optimizer(self) -> list[bool]:
        """True for each array of an optimizer, in the order of `paths`."""
        flags: list[bool] = []
        for slot in self.slots:
            flags += slot.is_of_optimizer()
        return flags

    @property
    def axis_names(self) -> list[AxisNames | None]:
        """The annotation of each array for its sharding, in the order of `paths`."""
        return [names for slot in self.slots for names in slot.axis_names()]

    def display_name(self, index: int) -> str:
        """Returns the name of an array in messages."""
        for slot, start, stop in self.ranges:
            if start <= index < stop:
                return slot.display_names()[index - start]
        raise IndexError(index)

    @property
    def nodes(self) -> Collection[Node]:
        """Returns the objects that hold others, with the path of each."""
        return self._walk.nodes.values()

    @property
    def _names(self) -> set[str] | None:
        """The attributes of the first root that matter; `None` for all."""
        reads_all = self._reads is not None and "__dict__" in self._reads
        return None if reads_all else self._reads

    @functools.cached_property
    def _watch(self) -> Watch:
        return Watch(self._walk, self._names)

    @functools.cached_property
    def _code_watch(self) -> CodeWatch:
        return CodeWatch(self._walk, self._names, self._functions)

    def search_again(self) -> "State":
        return State(self.roots, self._reads, self._functions)

    def watch(self) -> None:
        """Begins to watch the values that the steps have read by now."""
        # These are cached properties, which are made again from the reads so far.
        self.__dict__.pop("_watch", None)
        self.__dict__.pop("_code_watch", None)
        _ = self._watch, self._code_watch

    def is_current(self) -> bool:
        """Returns whether a new search would find the same objects and plain values.

        The arrays in the slots do not count.
        """
        return self._watch.is_current() and self._code_watch.is_current()

    def signature(self) -> tuple[Any, ...]:
        """Returns the properties of the slots that a compiled program depends on.

        A program also depends on plain values, which `is_current` compares.
        """
        rows: list[tuple[Any, ...]] = []
        for slot in self.slots:
            leaves = map(as_array, slot.read())
            types = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            kinds = tuple(slot.kinds())
            synchronization = slot.annotations.get("synchronization")
            rows.append((type(slot), slot.paths, kinds, synchronization, types))
        return tuple(rows)

    def changes_since(self, old: "State") -> dict[str, str]:
        """Returns the plain values that are not the same as in `old`, by path."""
        names = self._names
        # If both know a place, the walk counts.
        before = old._code_watch.facts() | find_facts(old._walk, names)
        now = self._code_watch.facts() | find_facts(self._walk, names)
        return find_differences(before, now)

    def note_read(self, name: str) -> None:
        """Records that a step is about to read an attribute of the first root."""
        if self._reads is not None:
            self._reads.add(name)

    def look(self) -> Walk:
        """Returns a walk over the objects of now, for `changes_between`."""
        walk = Walk(self.roots)
        walk.copy(walk.nodes.keys(), is_read=False)
        return walk

    def changes_between(self, before: Walk, after: Walk) -> dict[str, str]:
        """Returns, by path, the plain values that a step changed when traced."""
        # An attribute that no step has read counts only if the step assigned to it.
        names = self._names
        if names is not None:
            names = names | _find_assigned(before, after)
        old = find_facts(before, names)
        new = find_facts(after, names)
        return find_differences(old, new, before.holding_slots())

    def read(self) -> list[Any]:
        return [leaf for slot in self.slots for leaf in slot.read()]

    def write(self, leaves: Sequence[Any], only: set[int] | None = None) -> None:
        for slot, start, stop in self.ranges:
            is_wanted = only is None or not only.isdisjoint(range(start, stop))
            if is_wanted:
                slot.write(leaves[start:stop])

    @contextlib.contextmanager
    def swapped(self, leaves: Sequence[Any]) -> Iterator[None]:
        """Holds `leaves` in the slots for a while, in the current trace."""
        self._walk.forget_programs()
        undo: list[Callable[[], None]] = [self._walk.forget_programs]
        try:
            for slot, start, stop in self.ranges:
                undo.append(slot.swap(leaves[start:stop]))
            undo.extend(map(_move_node, self._nodes))
            yield
        finally:
            for restore in reversed(undo):
                restore()

    @contextlib.contextmanager
    def attributes_kept(self) -> Iterator[None]:
        """Restores the attributes of all objects at the end, such as `training`."""
        nodes = Walk(self.roots).nodes.values()
        parts = [part for node in nodes for part in node.parts]
        try:
            yield
        finally:
            for part in parts:
                if part.way is not ATTRIBUTES:
                    continue
                added = part.source.keys() - part.held.keys()
                for name in added:
                    del part.source[name]
                part.source.update(part.held)

    @contextlib.contextmanager
    def moved(self) -> Iterator[Callable[[], None]]:
        """Gives a function that moves the variables of this trace into another one."""
        slots = [slot for slot in self.slots if slot.is_here()]
        nodes = [node for node in self._nodes if adapter_of(node).is_here(node)]
        undo: list[Callable[[], None]] = []

        def move() -> None:
            undo.extend(slot.move() for slot in slots)
            undo.extend(map(_move_node, nodes))

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
        nodes = set(map(id, self._nodes))
        keys = {slot.key for slot in self.slots}
        return nodes | keys

    def move_new(self, other: "State") -> None:
        """Moves variables that `other` lacks into the current trace for good."""
        for slot in self.slots:
            if not other.holds(slot.variable):
                slot.move()
        for node in self._nodes:
            if not other.holds(node):
                _move_node(node)

    def collect(
        self,
        before: Sequence[Any],
        step_name: str,
        new_places: Sequence[str] = (),
    ) -> list[Any]:
        """Returns the arrays in the slots after a step, inside `swapped`.

        Raises if a loop cannot carry these arrays, or if there are `new_places`.
        """
        changes: list[str] = []
        leaves: list[Any] = []
        for slot, start, stop in self.ranges:
            try:
                values = slot.read()
            except StateStructureError as error:
                changes.extend(error.changes)
                continue
            rows = zip(slot.paths, before[start:stop], values, strict=True)
            for path, old, value in rows:
                new = as_array(value)
                is_alike = old.shape == new.shape and old.dtype == new.dtype
                if not is_alike:
                    changes.append(f"{path}: {describe(old)} became {describe(new)}")
            leaves.extend(map(strong, values))
        changes += new_places
        if not changes:
            return leaves

        num_places = len(self.paths) + len(new_places)
        lines = "\n".join(f"  {change}" for change in changes)
        way_out = (
            "Make every place in the constructor with its final shape and dtype (an "
            "array, `jnp.zeros(...)`, where it counts), and cast before assigning "
            "(`value.astype(jnp.float32)`)."
        )
        if "PerReplica" in lines:
            way_out = (
                "A `PerReplica` holds a value for each replica, but a slot needs one "
                "value. Make the replicas' values equal in the function given to `run` "
                '(`armillary.all_reduce("mean", gradients)`), and then take one value '
                '(`strategy.reduce("mean", value)`).'
            )
        raise StateStructureError(
            f"`{step_name}` changed {len(changes)} of {num_places} slots, and a "
            "compiled loop needs the same places with the same shape and dtype after "
            "every step:\n"
            f"{lines}\n{way_out}",
            changes=changes,
        )

    def find_new_places(self, after: Walk) -> list[str]:
        """Returns a line for each place that a step put an array into in vain."""
        keys = {slot.key for slot in self.slots}
        paths = {slot.path for slot in self.slots}
        lines: list[str] = []
        for key, slot in after.slots.items():
            if key in keys:
                continue
            if slot.path in paths:
                lines.append(
                    f"{slot.path}: in a new object that the step made, but the loop "
                    "carries the arrays of the old object: assign to the old object "
                    "(`variable[...] = value`, `setattr`), or make its class a pytree "
                    "(`jax.tree_util.register_dataclass`), so that a new value can "
                    "replace it"
                )
            else:
                lines.append(
                    f"{slot.path}: made by the step, so nothing carries it to the next "
                    "one"
                )
        for path, array in after.constants:
            # Other arrays are constants, which a program may have.
            if isinstance(array, Tracer):
                lines.append(
                    f"{path}: the step put an array into a name, a tuple or a "
                    "function, which nothing carries to the next step: hold it in an "
                    "attribute or a variable"
                )
        return lines


def _move_node(node: Any) -> Callable[[], None]:
    return adapter_of(node).move(node)


def _find_assigned(before: Walk, after: Walk) -> set[Any]:
    """Returns the attributes of the first root that a step has assigned to."""
    old = _attributes_of_root(before)
    new = _attributes_of_root(after)
    assigned: set[Any] = set()
    for name in old | new:
        before_step = old.get(name, ABSENT)
        after_step = new.get(name, ABSENT)
        if before_step is not after_step:
            assigned.add(name)
    return assigned


def _attributes_of_root(walk: Walk) -> dict[Any, Any]:
    held: dict[Any, Any] = {}
    for part in walk.nodes[id(walk.first_root)].parts:
        held.update(part.pairs)
    return held


def check_has_values(state: State) -> None:
    """Raises if an array of a state has only a shape, as from `nnx.eval_shape`."""
    refuse_types(zip(state.paths, state.read(), strict=True))


def refuse_types(leaves: Iterable[tuple[str, Any]]) -> None:
    """Raises if a leaf is the type of an array; each leaf comes with its path."""
    lines = [
        f"{path}: {describe(leaf)}"
        for path, leaf in leaves
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if not lines:
        return
    raise StateStructureError(
        f"{len(lines)} arrays of the state have shapes, but no values:\n"
        f"{list_lines(lines)}\n"
        "To train the model, make it with `strategy.make(make_model)`. A model of "
        "shapes alone, as from `nnx.eval_shape` or `jax.eval_shape`, can only be "
        "planned: `armillary.plan.plan(trainer, 64, abstract=True)`.",
        changes=lines,
    )


def take_tracers(roots: Sequence[tuple[Any, str]]) -> list[Slot]:
    """Removes arrays of a trace from plain places, and returns these places."""
    left = [
        slot
        for slot in slots_of(roots)
        if any(isinstance(leaf, Tracer) for leaf in slot.read())
    ]
    for slot in left:
        slot.write([None] * len(slot.paths))
    return left


def find_slots(root: Any, path: str = "") -> list[Slot]:
    return slots_of([(root, path)])


def strong(leaf: Any) -> jax.Array:
    """Returns `leaf` as an array without JAX's weak type."""
    array = as_array(leaf)
    if getattr(array, "weak_type", False):  # key arrays have no such attribute
        return jax.lax.convert_element_type(array, array.dtype)
    return array


def as_array(leaf: Any) -> jax.Array:
    """Returns `leaf` itself if it is a JAX array, so that identity tells changes.

    The type of an array in a plan is returned as it is.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf  # pyright: ignore[reportReturnType]
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
