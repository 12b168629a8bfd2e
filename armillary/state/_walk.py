"""One walk over everything that some objects reach: slots and plain values alike.

The walk follows attributes (also in `__slots__`), items and pytrees. For functions it
follows their closures and the globals that their code names. It is a loop over a stack,
so deep nests and cycles do not stop it. Its result is a graph of `Node`s.

A walk takes long. So `_watch` finds out whether a new walk would find anything else,
and `_differences` says what differs between two walks.
"""

import collections
import copy
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, TypeAlias

import jax

from armillary.errors import StateStructureError
from armillary.state._adapters import node_adapter, variable_adapter
from armillary.state._holders import (
    ATTRIBUTES,
    COMPILED_FUNCTION,
    children_of,
    global_names,
    is_claimed,
    is_mutable_leaf,
    parts_of,
)
from armillary.state._parts import Part
from armillary.state._slots import (
    PLAIN,
    Role,
    Slot,
    Trait,
    are_constant,
    are_plain,
    has_trait,
    hold_no_arrays,
    is_array,
)
from armillary.state._tree import (
    PURE_STATE,
    PureSlot,
    PureStateOwner,
    TreeSlot,
    is_object,
)

# JAX cannot flatten nests that are deeper than this, or that contain themselves.
_MAX_TREE_DEPTH = 100
# From so many values on, a look at all of them at once is faster than one by one. In a
# deep nest, such a look at each level would take time that grows with the cube of it.
_MANY = 16
_MANY_BYTES = 1 << 20


_Further: TypeAlias = Callable[[int], Iterable[int]]
"""A function from a holder to the next ones, by `id`."""

_FORGOTTEN = object()
"""Takes the place of the value of a slot, after a walk."""


class Node(NamedTuple):
    """A holder that was found. Without parts, it is a mutable value, such as a set."""

    value: Any
    path: str
    parts: list[Part]


class _Task(NamedTuple):
    """A value to visit: its path, and the part and the holders it was found in."""

    value: Any
    path: str
    part: Part | None = None
    name: Any = None
    above: tuple[int, Any] | None = None


class Walk:
    """One walk over pairs of an object and its path; slots come in a fixed order.

    Without `finds_plain`, it passes over nests of plain values, however long they are.
    """

    def __init__(
        self,
        roots: Iterable[tuple[Any, str]],
        *,
        finds_slots: bool = True,
        finds_plain: bool = True,
    ) -> None:
        self.roots = tuple(roots)
        self._finds_slots = finds_slots
        self._passes_over = are_constant if finds_plain else hold_no_arrays

        self.nodes: dict[int, Node] = {}
        self.slots: dict[Any, Slot] = {}
        # For each holder, the holders it leads to, with the name of the place.
        self.edges: dict[int, list[tuple[Any, int]]] = collections.defaultdict(list)
        # Arrays that nothing carries, such as those in a closure, by path.
        self.constants: list[tuple[str, Any]] = []
        self._copies: dict[int, Any] = {}
        self._roles: dict[int, Role] = {}

        self._tasks = [_Task(*root) for root in reversed(self.roots)]
        while self._tasks:
            self._visit(self._tasks.pop())
        # A node may be found after the variables that it gives a role.
        for key in self._roles.keys() & self.slots.keys():
            self.slots[key].role = self._roles[key]

    def _visit(self, task: _Task) -> None:
        """Adds the slots of one value, and a node if it can hold other values."""
        value = task.value
        if type(value) in PLAIN:
            return
        if not self._finds_slots:
            if is_array(value):
                return
        elif not _is_plain_nest(value) and self._add_state(task):
            return

        if task.above is not None:
            holder, name = task.above
            self.edges[holder].append((name, id(value)))
        if id(value) in self.nodes:
            return

        parts = parts_of(value)
        if parts or is_mutable_leaf(value):
            self.nodes[id(value)] = Node(value, task.path, parts)
            self._push(value, task.path, parts)

    def _add_state(self, task: _Task) -> bool:
        """Adds a value that holds arrays; returns whether the value is now done."""
        value = task.value
        path = task.path
        if is_array(value):
            if not self._add_place(task):
                self.constants.append((path, value))
            return True
        if task.part is not None and isinstance(value, getattr(jax, "Ref", ())):
            raise StateStructureError(
                f"`{path}` holds a `jax.Ref`, which neither strategies nor checkpoints "
                "carry. Use an `nnx.Variable`, or an array that the step assigns."
            )
        adapter = variable_adapter(type(value))
        if adapter is None:
            return not is_claimed(value) and self._add_place(task)
        if id(value) not in self.slots:
            slot = adapter.make_slot(value, path)
            if slot is not None:
                self._add(slot, None)
        return False

    def _push(self, value: Any, path: str, parts: list[Part]) -> None:
        """Adds a task for each value that a holder holds."""
        adapter = node_adapter(type(value))
        if adapter is not None:
            self._roles.update(adapter.roles_below(value, parts))

        # The tasks are a stack, so the first value comes last.
        for part in reversed(parts):
            if self._passes_over(part.values):
                continue
            for name, held in reversed(part.pairs):
                if type(held) in PLAIN:
                    continue
                if adapter is not None and adapter.is_internal(name):
                    continue
                place = part.way.join(path, name)
                above = (id(value), name)
                self._tasks.append(_Task(held, place, part, name, above))

    def _add_place(self, task: _Task) -> bool:
        """Adds a place if it holds an array or a pytree with arrays; returns if so."""
        value = task.value
        part = task.part
        if part is None or part.way.put is None:
            return False
        is_pure = self._owner_of_pure_state(task) is not None
        # A pure step may replace variables, so they count as part of its state.
        has_arrays = _has_arrays if is_pure else _holds_arrays
        try:
            if not (is_array(value) or has_arrays(value)):
                return False
            slot = self._make_slot(task)
        except (RecursionError, TypeError, ValueError):
            # JAX cannot flatten it: for example, a dict with mixed keys.
            return False
        self._add(slot, task.above)
        for leaf_path, leaf in reversed(slot.others):
            self._tasks.append(_Task(leaf, leaf_path, above=task.above))
        return True

    def _make_slot(self, task: _Task) -> Slot:
        part = task.part
        name = task.name
        path = task.path
        assert part is not None
        get = part.way.get
        put = part.way.put
        assert put is not None
        owner = self._owner_of_pure_state(task)
        if owner is not None:
            return PureSlot(part.source, name, path, get=get, put=put, owner=owner)
        return TreeSlot(part.source, name, path, get=get, put=put, stops_at=is_claimed)

    def _owner_of_pure_state(self, task: _Task) -> PureStateOwner | None:
        """Returns the trainer whose attribute `state` a task looks at."""
        if task.above is None or task.name != PURE_STATE or task.part is None:
            return None
        holder, _ = task.above
        owner = self.nodes[holder].value
        is_attribute = task.part.way is ATTRIBUTES
        is_pure = is_attribute and isinstance(owner, PureStateOwner)
        return owner if is_pure else None

    def _add(self, slot: Slot, above: tuple[int, Any] | None) -> None:
        if above is not None:
            slot.holder, _ = above
        # The first path that leads to a place is its name.
        self.slots.setdefault(slot.key, slot)

    @property
    def first_root(self) -> Any:
        """The object whose attributes may be watched by name, such as a trainer."""
        root, _ = self.roots[0]
        return root

    def reached_from(self, names: Collection[str] | None) -> set[int]:
        """Returns the holders that these attributes of the first root lead to."""
        first = None if names is None else id(self.first_root)
        wanted = names or ()
        constant = self.globals

        def below(holder: int) -> list[int]:
            children: list[int] = []
            for name, child in self.edges.get(holder, ()):
                is_left_out = holder == first and name not in wanted
                if not is_left_out and (holder, name) not in constant:
                    children.append(child)
            return children

        roots = [id(root) for root, _ in self.roots]
        return _spread(roots, below) & self.nodes.keys()

    @functools.cached_property
    def leading_to_slots(self) -> set[int]:
        """The holders that lead to a slot, or hold one."""
        parents: dict[int, list[int]] = collections.defaultdict(list)
        for parent, children in self.edges.items():
            for _, child in children:
                parents[child].append(parent)
        found = _spread(self.holding_slots(), lambda child: parents[child])
        return found & self.nodes.keys()

    @functools.cached_property
    def compiled(self) -> list[Any]:
        """The functions of `jax.jit` that lead to slots."""
        leading = self.leading_to_slots
        values = [node.value for key, node in self.nodes.items() if key in leading]
        return [value for value in values if isinstance(value, COMPILED_FUNCTION)]

    def forget_programs(self) -> None:
        """Clears the caches of `compiled`, whose programs hold the slots' old values.

        The next call of such a function traces it again.
        """
        for function in self.compiled:
            function.clear_cache()

    @functools.cached_property
    def names_of_slots(self) -> dict[int, set[Any]]:
        """The names of places with a slot, by the `id` of the source of their part."""
        names: dict[int, set[Any]] = collections.defaultdict(set)
        for key in self.slots:
            if isinstance(key, tuple):
                source, name = key
                names[source].add(name)
        return names

    def forget_arrays(self) -> None:
        """Lets go of the values of slots, which take memory and soon are outdated."""
        for node in self.nodes.values():
            for part in node.parts:
                names = self.names_of_slots.get(id(part.source))
                if names is None:
                    continue
                for i, name in enumerate(part.names):
                    if name in names:
                        part.values[i] = _FORGOTTEN

    def holding_slots(self) -> set[int]:
        """Returns the holders of slots; a variable without a holder is its own."""
        slots = self.slots.items()
        return {key if slot.holder is None else slot.holder for key, slot in slots}

    @functools.cached_property
    def globals(self) -> set[tuple[int, Any]]:
        """The globals of functions that do not lead to state, and so are constants."""
        found: set[tuple[int, Any]] = set()
        for holder, node in self.nodes.items():
            for name in global_names(node.value):
                value = node.parts[0].held.get(name)
                if id(value) not in self.leading_to_slots:
                    found.add((holder, name))
        return found

    def copy(self, holders: Collection[int], *, is_read: bool) -> list[tuple[Any, Any]]:
        """Copies values that are mutable; large arrays only if steps read them."""
        for holder in holders:
            node = self.nodes[holder]
            if node.parts or holder in self._copies:
                continue
            is_small = getattr(node.value, "nbytes", 0) <= _MANY_BYTES
            if is_read or is_small:
                self._copies[holder] = copy.copy(node.value)

        pairs: list[tuple[Any, Any]] = []
        for holder in self._copies.keys() & holders:
            value = self.nodes[holder].value
            pairs.append((value, self._copies[holder]))
        return pairs

    def fact(self, value: Any) -> Any:
        """Returns a value in the form in which two walks are compared."""
        node = self.nodes.get(id(value))
        if node is not None and node.parts:
            return HolderFact(value, type(value), node.path)
        return self._copies.get(id(value), value)


class HolderFact(NamedTuple):
    """A holder as walks compare it: its type, and the first path that leads to it."""

    value: Any
    kind: Any
    path: str


def slots_of(roots: Iterable[tuple[Any, str]]) -> list[Slot]:
    """Returns the slots that pairs of an object and its path lead to, by path."""
    walk = Walk(roots, finds_plain=False)
    return by_path(walk.slots.values())


def by_path(slots: Iterable[Slot]) -> list[Slot]:
    """Returns slots in the order of their paths, which is the same in every run."""
    return sorted(slots, key=lambda slot: slot.path)


def lasting_slots(walk: Walk) -> list[Slot]:
    """Returns the slots whose values matter beyond the current loop, by path."""
    reset_by_loops: set[int] = set()
    for node in walk.nodes.values():
        if has_trait(node.value, Trait.ONE_LOOP):
            for part in node.parts:
                reset_by_loops.update(map(id, part.values))
    # A slot of a plain place has no variable, and `None` may be held, too.
    slots = [
        slot
        for slot in walk.slots.values()
        if slot.variable is None or id(slot.variable) not in reset_by_loops
    ]
    return by_path(slots)


def _spread(start: Iterable[int], further: _Further) -> set[int]:
    """Returns all that `further` leads to, from `start`."""
    pending = list(start)
    reached: set[int] = set()
    while pending:
        current = pending.pop()
        if current not in reached:
            reached.add(current)
            pending += further(current)
    return reached


def _is_plain_nest(value: Any) -> bool:
    return type(value) in (dict, list) and are_plain(children_of(value))


def _has_arrays(value: Any) -> bool:
    """Returns whether a pytree has arrays, also in variables."""
    leaves = jax.tree.leaves(value, is_leaf=is_object)
    return any(map(is_array, leaves))


def _holds_arrays(value: Any, above: tuple[int, ...] = ()) -> bool:
    """Returns whether `value` is a pytree with arrays in it."""
    if len(above) > _MAX_TREE_DEPTH or id(value) in above:
        raise RecursionError("no tree")
    children = children_of(value)
    if are_plain(children):  # as most values have none
        return False
    several = children if isinstance(children, Collection) else ()
    if len(several) > _MANY and hold_no_arrays(several):
        return False
    above = (*above, id(value))
    # A cycle below any child raises an error, so all of them are visited.
    found = [
        is_array(child) or _holds_arrays(child, above)
        for child in children
        if type(child) not in PLAIN
    ]
    return any(found)
