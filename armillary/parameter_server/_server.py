"""A parameter server: holds variables, and applies changes in order of arrival."""

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from armillary._optional import import_ray

PartKey = tuple[int, int]
"""A variable and the number of one of its parts, from 0."""

# Larger answers go through the object store, where all readers share them.
_INLINE_BYTES = 100_000


class ArrayType(NamedTuple):
    """The type of a variable's array; for random keys, `dtype` is the type of words."""

    shape: tuple[int, ...]
    dtype: np.dtype
    impl: str | None = None  # for random keys, such as `"threefry2x32"`.

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def zeros(self) -> jax.Array:
        """Returns an array of this type, for a trace, which needs no values."""
        if self.impl is None:
            return jnp.zeros(self.shape, self.dtype)
        # The number of words in a key depends on the generator.
        key = jax.random.key(0, impl=self.impl)
        words_of_key = jax.random.key_data(key)
        shape = (*self.shape, *words_of_key.shape)
        words = jnp.zeros(shape, self.dtype)
        return jax.random.wrap_key_data(words, impl=self.impl)

    def from_host(self, array: Any) -> jax.Array:
        """Returns a JAX array of this type, from the form of `to_host`."""
        given = jnp.asarray(array)
        if self.impl is None:
            return given
        return jax.random.wrap_key_data(given, impl=self.impl)


def type_of(array: jax.Array) -> ArrayType:
    """Returns the type of an array, or of an array of random keys."""
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return ArrayType(array.shape, np.dtype(array.dtype))
    dtype = jax.random.key_data(array).dtype
    impl = str(jax.random.key_impl(array))
    return ArrayType(array.shape, np.dtype(dtype), impl)


def to_host(array: jax.Array) -> np.ndarray:
    """Returns an array in the form that is sent: words in place of random keys."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


class Location(NamedTuple):
    """The server that holds one part of a variable."""

    server: int
    part: PartKey
    rows: tuple[int, int] | None = None

    def cut(self, array: np.ndarray) -> np.ndarray:
        """Returns the part of a whole variable that is here."""
        if self.rows is None:
            return array
        start, stop = self.rows
        return array[start:stop]


def locations_to_read(locations: Sequence[Location]) -> Sequence[Location]:
    """Returns the locations that together hold a variable once."""
    are_copies = locations[0].rows is None
    return locations[:1] if are_copies else locations


def join_rows(
    locations: Sequence[Location], found: Mapping[PartKey, np.ndarray]
) -> np.ndarray:
    """Returns a variable, from the parts that were read."""
    rows = [found[location.part] for location in locations_to_read(locations)]
    if len(rows) == 1:
        return rows[0]  # without a copy
    return np.concatenate(rows)


class Push(NamedTuple):
    """The message of one call of a scheduled function to one server.

    Attributes:
        call: The number of the call.
        oldest: The number of the oldest call that Ray may still run again.
        version: The version of the server that the call has read.
        updates: For each optimizer, the gradients for parts of its parameters.
        additions: The values to add to parts of variables.
    """

    call: int
    oldest: int
    version: int
    updates: Mapping[Any, dict[PartKey, np.ndarray]]
    additions: Mapping[PartKey, np.ndarray]


class Actor:
    """The methods that all actors have."""

    def greet(self) -> tuple[int, str]:
        return os.getpid(), import_ray().util.get_node_ip_address()


class ParameterServer(Actor):
    """The actor of a server; its methods run one at a time, in order of arrival."""

    def __init__(self) -> None:
        self._values: dict[PartKey, jax.Array] = {}
        self._types: dict[int, ArrayType] = {}
        # By key: an optimizer's compiled update, and the parts that it needs.
        self._updates: dict[Any, Any] = {}
        # By call, in the order of arrival: its staleness.
        self._applied: OrderedDict[int, int] = OrderedDict()
        self._version = 0
        # The last answer for some parts, and its version: many workers read the same.
        self._snapshots: dict[tuple[PartKey, ...], tuple[int, Any]] = {}

    def put(
        self, types: dict[int, ArrayType], values: dict[PartKey, np.ndarray]
    ) -> None:
        """Sets parts of variables, new or known ones."""
        self._types.update(types)
        for part, value in values.items():
            variable, _ = part
            # The array is copied, because it arrives in read-only shared memory.
            own = np.array(value)
            self._values[part] = self._types[variable].from_host(own)
        self._snapshots.clear()

    def define(self, key: Any, update: Any) -> None:
        """Takes an optimizer (`LocalUpdate`), before the first gradients for it."""
        if key in self._updates:
            return
        # The old values are donated, so a server has memory for one copy of them.
        run = jax.jit(update.make(), donate_argnums=1)
        parts: list[PartKey] = []
        for part in self._values:
            variable, _ = part
            if variable in update.types:
                parts.append(part)
        self._updates[key] = run, parts

    def read(self, parts: tuple[PartKey, ...]) -> tuple[int, Any]:
        """Returns the version, and the values of some parts or a reference to them."""
        version, snapshot = self._snapshots.get(parts, (None, None))
        if version == self._version:
            return self._version, snapshot

        values = [to_host(self._values[part]) for part in parts]
        num_bytes = sum(value.nbytes for value in values)
        if num_bytes > _INLINE_BYTES:
            answer = _Reference([import_ray().put(values)])
        else:
            # The copies must not change, but programs use their buffers again.
            answer = [np.array(value) for value in values]
        self._snapshots[parts] = self._version, answer
        return self._version, answer

    def push(self, push: Push) -> int:
        """Applies the changes of a call; returns its staleness.

        The staleness is the number of new versions since the call read the variables.
        """
        # Ray may run a call again, and its changes count once.
        if push.call in self._applied:
            return self._applied[push.call]

        staleness = self._version - push.version
        for key, gradients in push.updates.items():
            update, parts = self._updates[key]
            held = {part: self._values[part] for part in parts}
            new = update(gradients, held)
            self._values.update(new)

        for part, change in push.additions.items():
            old = self._values[part]
            self._values[part] = (old + change).astype(old.dtype)
        self._version += 1

        # Older calls do not run again.
        while self._applied and next(iter(self._applied)) < push.oldest:
            self._applied.popitem(last=False)
        self._applied[push.call] = staleness
        return staleness

    def push_and_read(self, push: Push, parts: tuple[PartKey, ...]) -> tuple[Any, ...]:
        """Applies the changes of a call with `push`, and reads for the next one."""
        return self.push(push), *self.read(parts)


class _Reference(NamedTuple):
    """Values in the object store, in a list, so that Ray does not fetch them."""

    values: list[Any]


def fetch_values(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns an answer of a server, with its last part, the values, fetched."""
    *others, values = answer
    if isinstance(values, _Reference):
        values = import_ray().get(values.values[0])
    return *others, values
