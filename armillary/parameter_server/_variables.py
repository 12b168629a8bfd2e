"""Variables on parameter servers: where each lives, and the coordinator's copies."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from armillary._checks import is_positive_int
from armillary._logging import logger
from armillary._optional import import_ray
from armillary.errors import StateStructureError
from armillary.parameter_server._closures import ScheduledTask
from armillary.parameter_server._optimizers import (
    LocalUpdate,
    SplitUpdate,
    UpdateSpec,
    load_transformation,
)
from armillary.parameter_server._program import TaskSpec
from armillary.parameter_server._server import (
    ArrayType,
    Location,
    PartKey,
    fetch_values,
    join_rows,
    locations_to_read,
    to_host,
    type_of,
)
from armillary.parameter_server._tasks import PlacedTask
from armillary.state._lift import State, as_array
from armillary.state._slots import Slot


@dataclass(eq=False)
class _Variable:
    """One array of the coordinator's objects, which servers hold.

    Attributes:
        slot: The object that holds the array.
        offset: The number of the array in the slot.
        path: The path of the array, for messages.
        type: The type of the array.
        num_parts: The number of parts that the partitioner has chosen.
        locations: The locations of its parts; or, if it is whole, of its copies.
        held: The value of the coordinator's object at the last exchange with the
            servers.
    """

    slot: Slot
    offset: int
    path: str
    type: ArrayType
    num_parts: int
    locations: tuple[Location, ...] = ()
    held: Any = None


class Variables:
    """All variables that scheduled functions have reached, for several threads."""

    def __init__(
        self, num_servers: int, partitioner: Callable[..., Sequence[int]] | None
    ) -> None:
        self._partitioner = partitioner
        self._variables: list[_Variable] = []
        # By slot, and by path within the slot.
        self._numbers: dict[Any, dict[str, int]] = {}
        self._loads = [0] * num_servers
        # By key: an optimizer, and the servers that run it.
        self._updates: dict[Any, tuple[LocalUpdate, list[int]]] = {}
        self.lock = threading.RLock()
        """Held while a thread reads or writes the coordinator's objects."""

    def adopt(self, state: State) -> list[int]:
        """Returns the number of each array of a state."""
        numbers: list[int] = []
        with self.lock:
            for slot, _, _ in state.ranges:
                known = self._numbers.setdefault(slot.key, {})
                names = [path.removeprefix(slot.path) for path in slot.paths]
                lost = set(known) - set(names)
                for name in lost:
                    self._retire(known.pop(name))
                for offset, leaf in enumerate(slot.read()):
                    number = self._adopt(known, names[offset], slot, offset, leaf)
                    numbers.append(number)
        return numbers

    def _adopt(
        self,
        known: dict[str, int],
        name: str,
        slot: Slot,
        offset: int,
        leaf: Any,
    ) -> int:
        """Returns the number of one array, a new one if its type has changed."""
        type_ = type_of(as_array(leaf))
        number = known.get(name)
        if number is not None and self._variables[number].type != type_:
            self._retire(number)
            number = None
        if number is None:
            path = slot.paths[offset]
            # ORDER: the variable gets a number only if the partitioner raises no error.
            count = count_parts(self._partitioner, path, type_.shape, type_.dtype)
            number = len(self._variables)
            known[name] = number
            self._variables.append(_Variable(slot, offset, path, type_, count))
        # Another object of the program may hold the array now.
        variable = self._variables[number]
        variable.slot = slot
        variable.offset = offset
        return number

    def _retire(self, number: int) -> None:
        """Forgets the locations of a variable that was replaced by another one."""
        self._variables[number].locations = ()

    def place(
        self, task: ScheduledTask, spec: TaskSpec, servers: Sequence[Any]
    ) -> None:
        """Puts the variables of a scheduled function on servers, once."""
        with self.lock:
            if task.placed is not None:
                return
            numbers = task.numbers
            new: list[int] = []
            keys = tuple((task.number, index) for index in range(len(spec.updates)))
            # ORDER: variables of optimizers come first, because an optimizer's state
            # must be where its parameters are.
            for key, update in zip(keys, spec.updates, strict=True):
                dumped = task.transformations[update.transformation]
                new += self._place_update(key, update.renumbered(numbers), dumped)

            slots = sorted({*spec.additions, *spec.reads})
            for slot in slots:
                number = numbers[slot]
                variable = self._variables[number]
                if not variable.locations:
                    self._assign(number, 1, variable.type.num_bytes)
                    new.append(number)
            self._put(new, servers)
            self._define(keys, servers)

            locations: dict[int, tuple[Location, ...]] = {}
            for slot in (*slots, *spec.updated):
                variable = self._variables[numbers[slot]]
                locations[slot] = variable.locations
            task.placed = PlacedTask(locations, keys)

    def _place_update(self, key: Any, spec: UpdateSpec, dumped: bytes) -> list[int]:
        """Places the variables of one update; returns the new ones."""
        known = self._variables
        numbers = (*spec.param_slots, *spec.state_slots)
        types = {number: known[number].type for number in numbers}
        paths = {number: known[number].path for number in numbers}
        split = SplitUpdate(load_transformation(dumped), spec, types, paths)
        new = self._place_parameters(spec, split, types)

        found: set[int] = set()
        for param in spec.param_slots:
            found.update(location.server for location in known[param].locations)
        servers = sorted(found)

        # The optimizer's state is where its parameter is. State without a parameter,
        # such as a count of steps, is on each of the servers.
        everywhere = [Location(server, (0, 0)) for server in servers]
        for slot, owner in split.owners.items():
            of_owner = everywhere if owner is None else known[owner].locations
            locations = tuple(_for_variable(slot, location) for location in of_owner)
            if not known[slot].locations:
                known[slot].locations = locations
                new.append(slot)
            elif not set(known[slot].locations).issuperset(locations):
                raise RuntimeError(
                    f"{paths[slot]} of an optimizer was placed on a parameter server "
                    "by another function, before the one that updates its variables. "
                    "Schedule the function that calls the optimizer first."
                )
        update = LocalUpdate(dumped, spec, split.owners, types)
        self._updates[key] = update, servers
        return new

    def _place_parameters(
        self, spec: UpdateSpec, split: SplitUpdate, types: Mapping[int, ArrayType]
    ) -> list[int]:
        """Places the parameters of one update; returns the new ones."""
        # A parameter counts with its state, which is on the same server.
        sizes = {param: types[param].num_bytes for param in spec.param_slots}
        for slot, owner in split.owners.items():
            if owner is not None:
                sizes[owner] += types[slot].num_bytes

        # The largest first, because the small ones fill the gaps that are left.
        largest_first = sorted(sizes, key=lambda param: (-sizes[param], param))
        new: list[int] = []
        for param in largest_first:
            if not self._variables[param].locations:
                num_parts = self._count_parts(param, split)
                self._assign(param, num_parts, sizes[param])
                new.append(param)
        return new

    def _count_parts(self, number: int, split: SplitUpdate) -> int:
        """Returns the number of parts of a parameter; 1 if its optimizer needs all."""
        variable = self._variables[number]
        if variable.num_parts == 1 or split.is_rowwise(number):
            return variable.num_parts
        logger.warning(
            "%s stays whole on one parameter server, since its optimizer computes "
            "an element from others of the variable.",
            variable.path,
        )
        return 1

    def _assign(self, number: int, num_parts: int, num_bytes: int) -> None:
        """Places each part of a variable on the server that holds the fewest bytes."""
        variable = self._variables[number]
        loads = self._loads
        ranges: list[Any] = [None]
        if num_parts > 1:
            ranges = cut_rows(variable.type.shape[0], num_parts)
        locations: list[Location] = []
        for index, rows in enumerate(ranges):
            server = loads.index(min(loads))
            loads[server] += num_bytes // num_parts
            locations.append(Location(server, (number, index), rows))
        variable.locations = tuple(locations)

    def _define(self, keys: Iterable[Any], servers: Sequence[Any]) -> None:
        """Sends optimizers to the servers that run them."""
        asked: list[Any] = []
        for key in keys:
            update, indices = self._updates[key]
            asked += [servers[i].define.remote(key, update) for i in indices]
        import_ray().get(asked)

    def _put(self, numbers: Iterable[int], servers: Sequence[Any]) -> None:
        """Sends the values of the coordinator's objects to the servers."""
        messages: dict[int, tuple[dict[int, ArrayType], dict[PartKey, np.ndarray]]] = {}
        leaves: dict[int, Any] = {}
        for number in numbers:
            variable = self._variables[number]
            leaf = variable.slot.read()[variable.offset]
            leaves[number] = leaf
            array = to_host(as_array(leaf))
            for location in variable.locations:
                types, values = messages.setdefault(location.server, ({}, {}))
                types[number] = variable.type
                values[location.part] = location.cut(array)

        asked: list[Any] = []
        for index, (types, values) in messages.items():
            asked.append(servers[index].put.remote(types, values))
        import_ray().get(asked)
        # ORDER: only values that have arrived count as held.
        for number, leaf in leaves.items():
            self._variables[number].held = leaf

    def put_changed(self, servers: Sequence[Any]) -> None:
        """Sends the values that the program has set since the last exchange."""
        changed: list[int] = []
        with self.lock:
            for number, variable in enumerate(self._variables):
                if not variable.locations:
                    continue
                try:
                    leaf = variable.slot.read()[variable.offset]
                except StateStructureError:
                    self._retire(number)
                    continue

                if leaf is variable.held:
                    continue
                has_same_type = type_of(as_array(leaf)) == variable.type
                if has_same_type:
                    changed.append(number)
                else:  # A function that reaches the variable will be sent again.
                    self._retire(number)
            if changed:
                self._put(changed, servers)

    def put_all(self, servers: Sequence[Any]) -> None:
        """Sends everything to servers that hold nothing yet."""
        with self.lock:
            placed: list[int] = []
            for number, variable in enumerate(self._variables):
                if variable.locations:
                    placed.append(number)
            self._put(placed, servers)
            self._define(self._updates, servers)

    def fetch(self, servers: Sequence[Any]) -> None:
        """Copies the values of the servers into the coordinator's objects."""
        with self.lock:
            placed = [variable for variable in self._variables if variable.locations]
            found = _read_parts(placed, servers)
            leaves: dict[int, tuple[Slot, list[Any]]] = {}
            for variable in placed:
                # The array is copied, because its memory belongs to the object store.
                whole = jnp.array(join_rows(variable.locations, found))
                variable.held = variable.type.from_host(whole)
                slot = variable.slot
                _, held = leaves.setdefault(id(slot), (slot, slot.read()))
                held[variable.offset] = variable.held

            # A slot with several arrays is written once.
            for slot, held in leaves.values():
                slot.write(held)


def _for_variable(number: int, location: Location) -> Location:
    """Returns the location of the same part of another variable."""
    _, part = location.part
    return location._replace(part=(number, part))


def _read_parts(
    variables: Iterable[_Variable], servers: Sequence[Any]
) -> dict[PartKey, np.ndarray]:
    """Reads all parts of some variables, with one message for each server."""
    parts: dict[int, list[PartKey]] = {}
    for variable in variables:
        for location in locations_to_read(variable.locations):
            parts.setdefault(location.server, []).append(location.part)

    # All servers are asked before the first answer is awaited.
    asked: list[Any] = []
    for server, of_server in parts.items():
        asked.append(servers[server].read.remote(tuple(of_server)))
    answers = import_ray().get(asked)
    found: dict[PartKey, np.ndarray] = {}
    for of_server, answer in zip(parts.values(), answers, strict=True):
        _, values = fetch_values(answer)
        found.update(zip(of_server, values, strict=True))
    return found


def count_parts(
    partitioner: Callable[..., Any] | None,
    path: str,
    shape: tuple[int, ...],
    dtype: Any,
) -> int:
    """Returns the number of parts into which a variable is cut."""
    if partitioner is None or not shape:
        return 1
    found = partitioner(shape, dtype, axis=0)
    counts = list(found) if isinstance(found, Iterable) else []
    has_counts = len(counts) == len(shape) and all(map(is_positive_int, counts))
    cuts_first_only = has_counts and all(count == 1 for count in counts[1:])
    if not cuts_first_only:
        raise ValueError(
            f"`variable_partitioner` returned {found!r} for {path} of shape {shape}, "
            "but it must return how many parts each axis is cut into, and variables "
            f"are cut along their first axis only. Return {[1] * len(shape)} to leave "
            "this one whole."
        )
    return max(1, min(int(counts[0]), shape[0]))


def cut_rows(num_rows: int, num_parts: int) -> list[tuple[int, int]]:
    """Returns the ranges of rows of the parts, the first ones larger by at most 1."""
    size, num_larger = divmod(num_rows, num_parts)
    ranges: list[tuple[int, int]] = []
    start = 0
    for index in range(num_parts):
        is_larger = index < num_larger
        stop = start + size + is_larger
        ranges.append((start, stop))
        start = stop
    return ranges
