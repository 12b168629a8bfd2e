"""Where the arrays of a state lie: in a step, at the ends of a program, and at home.

A user may keep arrays in the memory of the host (`pinned_host`), such as the state of
an optimizer. They stay there between steps, and each step moves them to its devices.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from armillary._jax_compat import PROGRAMS_MOVE_MEMORY
from armillary.distribute._global_arrays import (
    PINNED_HOST,
    as_global,
    is_key,
    is_on_host,
)
from armillary.distribute._placement import Placement
from armillary.state._lift import State


class Homes:
    """The shardings of the arrays of a state; `None` stands for any device.

    An array has up to three of them: inside of a step, as an input or output of a
    program, and at home between programs. Most strategies have all three alike. Some
    keep arrays elsewhere between programs, such as on the host.

    Attributes:
        in_step: The sharding of each array inside of a step.
        of_program: Its sharding as an input or output of a program.
        between: Its sharding between programs.
        is_moved: Whether the last two differ.
        moves: Whether they differ for any array.
    """

    def __init__(self, state: State, placement: Placement) -> None:
        self.in_step = list(placement.state_shardings(state))
        self.of_program = list(self.in_step)
        self.between = [placement.home or sharding for sharding in self.of_program]

        # The strategy moves arrays to its home after each program anyway.
        self._has_one_home = placement.home is not None
        # Arrays that the user keeps in the memory of the host.
        self._kept: set[int] = set()
        # Among these, the arrays that programs take and return there.
        self._on_host: list[int] = []
        if not self._has_one_home:
            self._keep_on_host(state.read())

        pairs = zip(self.between, self.of_program, strict=True)
        self.is_moved = [between != of_program for between, of_program in pairs]
        self.moves = any(self.is_moved)

    def _keep_on_host(self, leaves: Sequence[Any]) -> None:
        """Finds the arrays that the user keeps in the memory of the host.

        Programs take and return them there, and a step moves them to the devices. With
        an earlier release of JAX, they are moved before and after a program.
        """
        for i, leaf in enumerate(leaves):
            if not is_on_host(leaf):
                continue
            self._kept.add(i)
            sharding = self.in_step[i] or leaf.sharding
            home = sharding.with_memory_kind(PINNED_HOST)
            self.between[i] = home
            if PROGRAMS_MOVE_MEMORY:
                self._on_host.append(i)
                self.of_program[i] = home
            else:
                self.of_program[i] = sharding.with_memory_kind("device")

    def has_moved_to_host(self, arrays: Iterable[tuple[int, Any]]) -> bool:
        """Returns whether the user has moved one of some arrays to the host since."""
        if self._has_one_home:
            return False
        return any(is_on_host(leaf) and i not in self._kept for i, leaf in arrays)

    def of_outputs(self, indices: Sequence[int]) -> list[Any]:
        """Returns the shardings of the arrays with these indices after a program."""
        return [self.of_program[i] for i in indices]

    def bring(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns all arrays in the memory of the devices, for a step."""
        space = jax.memory.Space.Device
        brought = list(arrays)
        for i in self._on_host:
            brought[i] = _move(brought[i], self.in_step[i], space)
        return brought

    def send_back(self, indices: Sequence[int], arrays: Sequence[Any]) -> list[Any]:
        """Returns the arrays with these indices in their memory, after a step."""
        if not self._on_host:
            return list(arrays)
        space = jax.memory.Space.Host
        sent: list[Any] = []
        for i, array in zip(indices, arrays, strict=True):
            if i in self._on_host:
                sent.append(_move(array, self.of_program[i], space))
            else:
                sent.append(array)
        return sent

    def return_to_host(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns all arrays, and in its memory what the user keeps on the host."""
        homes: list[Any] = [None] * len(self.between)
        for i in self._kept:
            homes[i] = self.between[i]
        return put(arrays, homes)


def _move(array: Any, sharding: Any, space: Any) -> Any:
    """Moves an array to another memory of its devices."""
    # XLA divides a moved array only as its sharding says. On a single device, JAX takes
    # no sharding here in a program.
    is_named = isinstance(sharding, NamedSharding)
    return jax.device_put(array, sharding if is_named else space)


def put(
    leaves: Sequence[jax.Array], shardings: Sequence[Any], copies: Sequence[bool] = ()
) -> list[jax.Array]:
    """Puts arrays on devices, some as copies; with `None`, they stay in place."""
    if not leaves:
        return []  # The usual case, and even an empty transfer takes time.

    copies = copies or [False] * len(leaves)
    copied = iter(copy_arrays(list(itertools.compress(leaves, copies))))
    placed: list[jax.Array] = []
    for leaf, is_copy in zip(leaves, copies, strict=True):
        placed.append(next(copied) if is_copy else leaf)

    targets: dict[int, Any] = {}
    for n, (target, is_copy) in enumerate(zip(shardings, copies, strict=True)):
        if target is None:
            continue
        # Outputs of a program are committed to their devices. If its first inputs were
        # not, the program would be compiled again.
        if placed[n].sharding == target and placed[n].committed:
            continue
        if target.is_fully_addressable:
            targets[n] = target
            continue
        # A copy, because the device may share memory with the host.
        whole = as_global(placed[n], target)
        placed[n] = whole.copy() if is_copy else whole

    # In one call, because each call costs as much as a small array.
    to_move = [placed[n] for n in targets]
    moved = jax.device_put(to_move, list(targets.values()))
    for n, array in zip(targets, moved, strict=True):
        placed[n] = array
    return placed


def copy_arrays(arrays: list[jax.Array]) -> list[jax.Array]:
    """Copies arrays on their devices, without compiling a program for each shape."""
    # `device_put` with `may_alias=False` copies only to the same devices: a move may
    # share memory. It also moves keys to the first device, so they are copied alone.
    plain = [array for array in arrays if not is_key(array)]
    homes: list[Any] = []
    for array in plain:
        # For an array that spans processes, the sharding must be passed.
        spans_processes = not array.is_fully_addressable
        homes.append(array.sharding if spans_processes else None)
    copied = iter(jax.device_put(plain, homes, may_alias=False))
    return [array.copy() if is_key(array) else next(copied) for array in arrays]
