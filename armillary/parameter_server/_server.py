"""A parameter server: holds variables, and applies what workers send, as it arrives."""

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from armillary._optional import import_ray
from armillary.parameter_server._array_types import ArrayType, to_host
from armillary.parameter_server._program import Addition, UpdateSpec
from armillary.parameter_server._shipping import load_transformation
from armillary.parameter_server._split_update import make_local_update

Part = tuple[int, int]
"""A variable and the number of one of its parts, from 0."""

# Larger answers go through the object store, where all readers share them.
_INLINE_BYTES = 100_000


class Push(NamedTuple):
    """What one call of a scheduled function sends to one server.

    Attributes:
        call: The number of the call. Of two attempts, the first is applied.
        oldest: The smallest number of a call that has not ended; what was applied for
            older ones may be forgotten.
        version: The server's version that the call has read.
        round: The calls that are applied together as one, by `commit`; `None` if each
            is applied as it arrives.
        updates: For each update, its key and the gradients by part.
        additions: What is added, by part, and how.
    """

    call: int
    oldest: int
    version: int
    round: int | None
    updates: Sequence[tuple[Any, dict[Part, np.ndarray]]]
    additions: dict[Part, tuple[Addition, np.ndarray]]


class LocalUpdate(NamedTuple):
    """What a server needs to know of an optimizer.

    Attributes:
        transformation: The pickled optimizer.
        spec: How it is called, by variable.
        owners: `SplitUpdate.owners`, by variable.
        types: Shape and dtype of each variable.
        parts: The parts of variables that are here: variable, number, rows or -1.
    """

    transformation: bytes
    spec: UpdateSpec
    owners: dict[int, int | None]
    types: dict[int, ArrayType]
    parts: tuple[tuple[int, int, int], ...]


class ParameterServer:
    """The actor. Its methods run one after the other, in order of arrival."""

    def __init__(self) -> None:
        self._values: dict[Part, jax.Array] = {}
        self._types: dict[int, ArrayType] = {}
        self._updates: dict[Any, Any] = {}
        self._applied: OrderedDict[int, int] = OrderedDict()
        self._round: dict[int, Push] = {}
        self._version = 0
        self._snapshots: dict[tuple[Part, ...], tuple[int, Any]] = {}

    def greet(self) -> tuple[int, str]:
        """Returns the process number and the address of the machine."""
        return os.getpid(), import_ray().util.get_node_ip_address()

    def put(self, types: dict[int, ArrayType], values: dict[Part, np.ndarray]) -> None:
        """Sets parts of variables, new ones or others."""
        self._types.update(types)
        for part, value in values.items():
            # A copy: what arrives is read-only memory that all processes share.
            self._values[part] = self._types[part[0]].from_host(np.array(value))
        self._snapshots.clear()

    def define(self, key: Any, update: LocalUpdate) -> None:
        """Hears of an optimizer, before the first gradients for it."""
        if key not in self._updates:
            run = make_local_update(
                load_transformation(update.transformation),
                update.spec,
                update.owners,
                update.types,
                update.parts,
            )
            parts = [
                part
                for part in self._values
                if part[0] in update.owners
                or part[0] in jax.tree.leaves(update.spec.params)
            ]
            self._updates[key] = jax.jit(run, donate_argnums=1), parts

    def read(self, parts: tuple[Part, ...]) -> tuple[int, Any]:
        """Returns the version, and the values of some parts or a reference to them."""
        version, values = self._snapshots.get(parts, (None, None))
        if version != self._version:
            values = [to_host(self._values[part]) for part in parts]
            if sum(value.nbytes for value in values) > _INLINE_BYTES:
                values = _Reference([import_ray().put(values)])
            else:
                # Buffers of programs are used again: these must not change any more.
                values = [np.array(value) for value in values]
            self._snapshots[parts] = self._version, values
        return self._version, values

    def push(self, push: Push) -> int:
        """Applies what a call sends; returns how many versions came since it read."""
        if push.call in self._applied:
            return self._applied[push.call]
        if push.round is not None:
            self._round[push.call] = push
            return 0
        staleness = self._version - push.version
        self._apply(push.updates, {p: [v] for p, v in push.additions.items()}, 1)
        while self._applied and next(iter(self._applied)) < push.oldest:
            self._applied.popitem(last=False)
        self._applied[push.call] = staleness
        return staleness

    def push_and_read(self, push: Push, parts: tuple[Part, ...]) -> tuple[Any, ...]:
        """Applies what a call sends, and reads for the next; `push`, then `read`."""
        return self.push(push), *self.read(parts)

    def commit(self, calls: Sequence[int]) -> list[int]:
        """Applies calls that ran together as one update."""
        pushes = [self._round[call] for call in calls if call in self._round]
        self._round.clear()
        if not pushes:
            return []
        sums: dict[Any, dict[Part, Any]] = {}
        additions: dict[Part, list[Any]] = {}
        for push in pushes:
            for key, gradients in push.updates:
                known = sums.setdefault(key, {})
                for part, gradient in gradients.items():
                    known[part] = known[part] + gradient if part in known else gradient
            for part, addition in push.additions.items():
                additions.setdefault(part, []).append(addition)
        different = {
            part[0]
            for part, ((how, first), *others) in additions.items()
            if how is Addition.EQUAL
            and not all(np.array_equal(first, other) for _, other in others)
        }
        if different:
            return sorted(different)
        self._apply(list(sums.items()), additions, len(pushes))
        return []

    def _apply(
        self,
        updates: Sequence[tuple[Any, dict[Part, Any]]],
        additions: dict[Part, list[tuple[Addition, Any]]],
        count: int,
    ) -> None:
        for key, gradients in updates:
            if gradients:
                run, parts = self._updates[key]
                self._values.update(run(gradients, {p: self._values[p] for p in parts}))
        for part, all_ in additions.items():
            how = all_[0][0]
            is_sum = how in {Addition.SUM, Addition.MEAN}
            values = [value for _, value in all_[: None if is_sum else 1]]
            change = sum(values[1:], start=values[0])
            if how is Addition.MEAN:
                change = change / count
            old = self._values[part]
            self._values[part] = (old + change).astype(old.dtype)
        self._version += 1


class _Reference(NamedTuple):
    """Values in the object store; in a list, or Ray would fetch them."""

    values: list[Any]


def fetch(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns an answer of a server that ends with values, and has these fetched."""
    *others, values = answer
    if isinstance(values, _Reference):
        values = import_ray().get(values.values[0])
    return *others, values
