"""Variables on parameter servers: where each lives, and the coordinator's copies.

The objects of the coordinator are current after `join`. What is put into them between
calls (by a checkpoint, by hand) is sent before the next call.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from armillary._checks import is_positive_int
from armillary._logging import logger
from armillary._optional import import_ray
from armillary.errors import ReplicaMismatchError, StateStructureError
from armillary.parameter_server._array_types import (
    ArrayType,
    to_host,
    type_of,
)
from armillary.parameter_server._program import TaskSpec, UpdateSpec
from armillary.parameter_server._server import LocalUpdate, Part, fetch
from armillary.parameter_server._shipping import load_transformation
from armillary.parameter_server._split_update import SplitUpdate
from armillary.parameter_server._worker import PlacedTask
from armillary.state._lift import State, as_array
from armillary.state._slots import Slot
from armillary.typing import PyTree

_P = ParamSpec("_P")
_R = TypeVar("_R")

Rows = tuple[int, int] | None


class Place(NamedTuple):
    """Where one part of a variable lives.

    Attributes:
        server: The number of the parameter server.
        part: The variable and the part's number.
        rows: Its rows; `None` for a whole variable.
    """

    server: int
    part: Part
    rows: Rows


class _Variable:
    def __init__(
        self, slot: Slot, offset: int, path: str, type_: ArrayType, num_parts: int
    ) -> None:
        self.slot, self.offset, self.path, self.type = slot, offset, path, type_
        # What the partitioner wants for it.
        self.num_parts = num_parts
        self.places: tuple[Place, ...] = ()
        # Other servers that have a copy, of what all updates of an optimizer share.
        self.copies: tuple[int, ...] = ()
        # What the coordinator's object held when it was last in step with the servers.
        self.held: Any = None


def _locked(
    method: Callable[Concatenate["Variables", _P], _R],
) -> Callable[Concatenate["Variables", _P], _R]:
    """Lets one thread at a time into such methods."""

    @functools.wraps(method)
    def locked(self: "Variables", *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class Variables:
    """All variables that scheduled functions have reached.

    Args:
        num_servers: How many parameter servers there are.
        partitioner: Into how many parts a variable is cut; `None` leaves all whole.
    """

    def __init__(
        self, num_servers: int, partitioner: Callable[..., Sequence[int]] | None
    ) -> None:
        self._partitioner = partitioner
        self._variables: list[_Variable] = []
        # By slot, and by path within the slot.
        self._numbers: dict[Any, dict[str, int]] = {}
        self._loads = [0] * num_servers
        self._updates: dict[Any, dict[int, LocalUpdate]] = {}
        # The dispatcher places variables while other threads look for changed ones.
        self._lock = threading.RLock()

    def different_error(self, numbers: Sequence[int]) -> ReplicaMismatchError:
        """Returns the error for variables to which workers have added other values."""
        paths = ", ".join(self._variables[number].path for number in numbers)
        return ReplicaMismatchError(
            f"Workers have added different values to {paths} in one update. With "
            "`max_staleness=0` that must be the same on all of them, as the gradients "
            "of an optimizer are not. Use an optimizer, or a variable with "
            "`aggregation=VariableAggregation.SUM`."
        )

    @_locked
    def adopt(self, state: State) -> list[int]:
        """Returns the number of each array of a state.

        Raises:
            ValueError: If the partitioner returns no counts of parts for one.
        """
        numbers: list[int] = []
        for slot, _, _ in state.ranges:
            known = self._numbers.setdefault(slot.key, {})
            names = [path.removeprefix(slot.path) for path in slot.paths]
            for name in set(known) - set(names):
                self._retire(known.pop(name))
            for offset, (name, leaf) in enumerate(zip(names, slot.read(), strict=True)):
                type_ = type_of(as_array(leaf))
                number = known.get(name)
                if number is not None and self._variables[number].type != type_:
                    self._retire(number)
                    number = None
                if number is None:
                    path = slot.paths[offset]
                    num_parts = count_parts(
                        self._partitioner, path, type_.shape, type_.dtype
                    )
                    number = known[name] = len(self._variables)
                    self._variables.append(
                        _Variable(slot, offset, path, type_, num_parts)
                    )
                variable = self._variables[number]
                variable.slot, variable.offset = slot, offset
                numbers.append(number)
        return numbers

    def _retire(self, number: int) -> None:
        """Forgets a variable whose place holds something else by now."""
        variable = self._variables[number]
        variable.places = variable.copies = ()

    @_locked
    def place(
        self,
        task: int,
        numbers: Sequence[int],
        spec: TaskSpec,
        transformations: Sequence[bytes],
        servers: Sequence[Any],
    ) -> PlacedTask:
        """Puts what a scheduled function needs on servers, where it is not yet."""
        new: list[int] = []
        keys: list[Any] = []
        for index, update in enumerate(spec.updates):
            by_variable = _renumber(update, numbers)
            key = task, index
            new += self._place_update(key, by_variable, transformations)
            keys.append(key)
        slots = {*spec.additions, *spec.reads}
        for number in (numbers[slot] for slot in sorted(slots)):
            if not self._variables[number].places:
                self._assign(number, 1, self._variables[number].type.num_bytes)
                new.append(number)
        self._put(new, servers)
        for key in keys:
            self._define(key, servers)
        slots.update(s for u in spec.updates for s in jax.tree.leaves(u.params))
        return PlacedTask(
            {slot: self._variables[numbers[slot]].places for slot in slots},
            tuple(keys),
        )

    def _place_update(
        self, key: Any, spec: UpdateSpec, transformations: Sequence[bytes]
    ) -> list[int]:
        known = self._variables
        dumped = transformations[spec.transformation]
        types = {i: variable.type for i, variable in enumerate(known)}
        paths = {i: variable.path for i, variable in enumerate(known)}
        split = SplitUpdate(load_transformation(dumped), spec, types, paths)
        params = jax.tree.leaves(spec.params)
        own: dict[int, list[int]] = {param: [] for param in params}
        shared: list[int] = []
        for slot, owner in split.owners.items():
            (shared if owner is None else own[owner]).append(slot)
        new: list[int] = []
        sizes = {
            param: sum(known[i].type.num_bytes for i in (param, *own[param]))
            for param in params
        }
        for param in sorted(params, key=lambda param: (-sizes[param], param)):
            if not known[param].places:
                count = self._count_parts(param, split)
                self._assign(param, count, sizes[param])
                new.append(param)
            for slot in own[param]:
                self._follow(slot, param, new)
        servers = sorted({place.server for p in params for place in known[p].places})
        for slot in shared:
            variable = known[slot]
            if not variable.places:
                variable.places = (Place(servers[0], (slot, 0), None),)
                variable.copies = tuple(servers[1:])
                new.append(slot)
            elif variable.places[0].server not in servers:
                raise RuntimeError(_late_message(variable.path))
            else:
                there = {variable.places[0].server, *variable.copies}
                if not there.issuperset(servers):
                    variable.copies += tuple(sorted({*servers} - there))
                    new.append(slot)
        self._updates[key] = {
            server: LocalUpdate(
                dumped,
                spec,
                split.owners,
                {i: types[i] for i in (*params, *split.owners)},
                tuple(
                    (*place.part, -1 if place.rows is None else np.ptp(place.rows))
                    for param in params
                    for place in known[param].places
                    if place.server == server
                ),
            )
            for server in servers
        }
        return new

    def _count_parts(self, number: int, split: SplitUpdate) -> int:
        variable = self._variables[number]
        count = variable.num_parts
        if count > 1 and not split.is_elementwise(number):
            logger.warning(
                "%s stays whole on one parameter server, since its optimizer computes "
                "an element from others of the variable.",
                variable.path,
            )
            return 1
        return count

    def _assign(self, number: int, num_parts: int, num_bytes: int) -> None:
        variable, loads = self._variables[number], self._loads
        places: list[Place] = []
        rows: list[Rows] = [None]
        if num_parts > 1:
            rows = list(cut(variable.type.shape[0], num_parts))
        for index, part in enumerate(rows):
            server = min(range(len(loads)), key=lambda i: (loads[i], i))
            loads[server] += num_bytes // num_parts
            places.append(Place(server, (number, index), part))
        variable.places = tuple(places)

    def _follow(self, number: int, param: int, new: list[int]) -> None:
        """Puts an array of an optimizer where its variable is."""
        variable, leader = self._variables[number], self._variables[param]
        places = tuple(
            Place(place.server, (number, place.part[1]), place.rows)
            for place in leader.places
        )
        if variable.places and variable.places != places:
            raise RuntimeError(_late_message(variable.path))
        if not variable.places:
            variable.places = places
            new.append(number)

    def _define(self, key: Any, servers: Sequence[Any]) -> None:
        import_ray().get(
            [
                servers[server].define.remote(key, update)
                for server, update in self._updates[key].items()
            ]
        )

    def _put(self, numbers: Sequence[int], servers: Sequence[Any]) -> None:
        """Sends what the coordinator's objects hold."""
        types: dict[int, dict[int, ArrayType]] = {}
        values: dict[int, dict[Part, np.ndarray]] = {}
        leaves: dict[int, Any] = {}
        for number in numbers:
            variable = self._variables[number]
            leaf = leaves[number] = variable.slot.read()[variable.offset]
            array = to_host(as_array(leaf))
            for server, part, rows in variable.places:
                types.setdefault(server, {})[number] = variable.type
                share = array if rows is None else array[slice(*rows)]
                values.setdefault(server, {})[part] = share
            for server in variable.copies:
                types.setdefault(server, {})[number] = variable.type
                values.setdefault(server, {})[number, 0] = array
        import_ray().get(
            [servers[i].put.remote(types[i], values[i]) for i in sorted(values)]
        )
        for number, leaf in leaves.items():
            self._variables[number].held = leaf

    @_locked
    def put_changed(self, servers: Sequence[Any]) -> None:
        """Sends what was put into the coordinator's objects since they were in step."""
        changed: list[int] = []
        for number, variable in enumerate(self._variables):
            if not variable.places:
                continue
            try:
                leaf = variable.slot.read()[variable.offset]
            except StateStructureError:
                self._retire(number)
                continue
            if leaf is variable.held:
                continue
            if type_of(as_array(leaf)) == variable.type:
                changed.append(number)
            else:  # A function that reaches it will be sent again, for another array.
                self._retire(number)
        if changed:
            self._put(changed, servers)

    @_locked
    def put_all(self, servers: Sequence[Any]) -> None:
        """Fills servers that are new."""
        self._put(
            [i for i, variable in enumerate(self._variables) if variable.places],
            servers,
        )
        for key in self._updates:
            self._define(key, servers)

    @_locked
    def fetch(self, servers: Sequence[Any]) -> None:
        """Puts what the servers hold into the coordinator's objects."""
        parts: dict[int, list[Part]] = {}
        for variable in self._variables:
            for server, part, _ in variable.places:
                parts.setdefault(server, []).append(part)
        found: dict[Part, np.ndarray] = {}
        answers = import_ray().get(
            [servers[i].read.remote(tuple(held)) for i, held in parts.items()]
        )
        for held, answer in zip(parts.values(), answers, strict=True):
            found.update(zip(held, fetch(answer)[1], strict=True))
        leaves: dict[int, list[Any]] = {}
        for variable in self._variables:
            if not variable.places:
                continue
            rows = [found[part] for _, part, _ in variable.places]
            whole = rows[0] if len(rows) == 1 else np.concatenate(rows)
            # A copy: what arrives is memory of the object store.
            variable.held = variable.type.from_host(jnp.array(whole))
            held = leaves.setdefault(id(variable.slot), variable.slot.read())
            held[variable.offset] = variable.held
        for variable in self._variables:
            if id(variable.slot) in leaves:
                variable.slot.write(leaves.pop(id(variable.slot)))


def _renumber(spec: UpdateSpec, numbers: Sequence[int]) -> UpdateSpec:
    def renumber(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda slot: numbers[slot], tree)

    return spec._replace(state=renumber(spec.state), params=renumber(spec.params))


def _late_message(path: str) -> str:
    return (
        f"{path} of an optimizer was placed on a parameter server by another function, "
        "before the one that updates its variables. Schedule the function that calls "
        "the optimizer first."
    )


def count_parts(
    partitioner: Callable[..., Any] | None,
    path: str,
    shape: tuple[int, ...],
    dtype: Any,
) -> int:
    """Returns into how many parts a variable shall be cut.

    Raises:
        ValueError: If the partitioner returns something else than counts for it.
    """
    if partitioner is None or not shape:
        return 1
    found = partitioner(shape, dtype, axis=0)
    counts = list(found) if isinstance(found, Iterable) else []
    is_right = len(counts) == len(shape) and all(map(is_positive_int, counts))
    if not is_right or any(count != 1 for count in counts[1:]):
        raise ValueError(
            f"`variable_partitioner` returned {found!r} for {path} of shape {shape}, "
            "but it must return how many parts each axis is cut into, and variables "
            f"are cut along their first axis only. Return {[1] * len(shape)} to leave "
            "this one whole."
        )
    return max(1, min(int(counts[0]), shape[0]))


def cut(num_rows: int, num_parts: int) -> list[tuple[int, int]]:
    """Returns the ranges of rows of the parts, the first ones larger by at most 1."""
    size, rest = divmod(num_rows, num_parts)
    stops = [size * (i + 1) + min(i + 1, rest) for i in range(num_parts)]
    return list(zip([0, *stops], stops, strict=False))
