"""The arrays that a `Checkpoint` leaves out, such as a frozen base.

Their digests are computed when the `Checkpoint` is made. A save writes the digests in
place of the arrays, and refuses an array that has changed, because its values would be
lost. So an array that a trained part shares is found at the first save after a step. An
array that is still the same object has not changed, which costs nothing to find out.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from armillary._checks import counted, list_lines
from armillary._planned import is_planning
from armillary.checkpoint._digests import Digests
from armillary.checkpoint._selection import as_paths, is_inside
from armillary.errors import CheckpointError
from armillary.state._slots import Slot
from armillary.state._walk import Walk


class LeftOut:
    """The arrays that `leave_out` names, by their paths in the checkpoint.

    Args:
        leave_out: Paths and objects, alone or in a list.
        slots: The slots of the checkpoint.
        leaves: The arrays of the slots, by path.
        states: Names of objects that are saved by `get_state`.
    """

    def __init__(
        self,
        leave_out: Any,
        slots: Sequence[Slot],
        leaves: Mapping[str, Any],
        states: Collection[str],
    ) -> None:
        self._digests = Digests()
        self._first: dict[str, str] = {}
        self.paths: frozenset[str] = frozenset()
        if leave_out is None:
            return
        self.paths = frozenset(_find_paths(leave_out, slots, leaves))
        if leaves.keys() <= self.paths and not states:
            raise ValueError(
                f"`leave_out` names all {len(leaves)} arrays of the `Checkpoint`, so "
                "nothing would be saved. Leave out only the frozen arrays, or pass "
                "the object that trains: `Checkpoint(trainer=trainer, leave_out=...)`."
            )
        if not is_planning():
            self._first = self.find_digests(leaves, self.paths)

    def find_digests(
        self, leaves: Mapping[str, Any], paths: Collection[str]
    ) -> dict[str, str]:
        """Returns the digests of the arrays at some paths, if they are in `leaves`.

        Raises:
            CheckpointError: If the memory of one was donated, so that it has no values.
        """
        own = {path: leaf for path, leaf in leaves.items() if path in paths}
        # A deleted array may be one whose digest is known.
        lost = [path for path, leaf in own.items() if _is_deleted(leaf)]
        if lost:
            raise CheckpointError(
                f"{counted(len(lost), 'array')} without values in a checkpoint "
                "(`leave_out`) cannot be compared with the program, because their "
                f"memory was donated to a program or deleted:\n{list_lines(lost)}\n"
                "Load these arrays again, and do not donate them."
            )
        return self._digests.find(own)

    def check(self, leaves: Mapping[str, Any]) -> dict[str, str]:
        """Returns the digests of all left out arrays.

        Raises:
            CheckpointError: If one has changed.
        """
        digests = self.find_digests(leaves, self.paths)
        changed: list[str] = []
        for path, digest in digests.items():
            # In a plan, the first arrays had no values.
            if digest != self._first.setdefault(path, digest):
                changed.append(path)
        if changed:
            raise CheckpointError(
                f"`leave_out` names {counted(len(changed), 'array')} that changed "
                f"after `Checkpoint(...)` was made:\n{list_lines(sorted(changed))}\n"
                "Their values would be lost. Train only other arrays "
                "(`wrt=nnx.LoRAParam`), or remove these from `leave_out`, because a "
                "trained part may share them. Load a base before you make the "
                "`Checkpoint`."
            )
        return digests


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _find_paths(
    leave_out: Any, slots: Sequence[Slot], leaves: Mapping[str, Any]
) -> list[str]:
    """Returns the paths of the arrays that are named."""
    is_list = isinstance(leave_out, list | tuple | set)
    entries = list(leave_out) if is_list else [leave_out]
    names = [entry for entry in entries if isinstance(entry, str)]
    objects = [entry for entry in entries if not isinstance(entry, str)]
    parts = as_paths("leave_out", names)
    for part in parts:
        if not any(is_inside(path, [part]) for path in leaves):
            _refuse_nothing(f"has {part!r}", leaves)
    found = [path for path in leaves if is_inside(path, parts)]

    # Each object on its own, so that a mistake in one of several is found.
    for entry in objects:
        own = _find_places(entry, slots) or _find_arrays(entry, leaves)
        if not own:
            _refuse_nothing(f"has a `{type(entry).__name__}`", leaves)
        found += own
    if not found:
        _refuse_nothing("is empty", leaves)
    return found


def _find_places(entry: Any, slots: Sequence[Slot]) -> list[str]:
    """Returns the paths of the places that an object holds, such as its variables."""
    keys = Walk([(entry, "leave_out")], finds_plain=False).slots.keys()
    return [path for slot in slots if slot.key in keys for path in slot.paths]


def _find_arrays(entry: Any, leaves: Mapping[str, Any]) -> list[str]:
    """Returns the paths of an array, or of the arrays of a pytree.

    A pytree in an attribute, such as `run.params["base"]`, is not a place of its own.
    """
    arrays = {id(leaf) for leaf in jax.tree.leaves(entry)}
    return [path for path, leaf in leaves.items() if id(leaf) in arrays]


def _refuse_nothing(what: str, leaves: Mapping[str, Any]) -> None:
    raise ValueError(
        f"`leave_out` {what}, but it must name arrays of the `Checkpoint`:\n"
        f"{list_lines(leaves)}\n"
        "Use one of these paths, the first part of some of them (without `*`), or an "
        "object that holds some of these arrays, such as "
        "`armillary.lora.base(model)`."
    )
