"""Puts values into the objects of a checkpoint.

`put_all` changes everything or nothing, and so it holds the old values until the end.
`put_arrays` replaces some arrays at once, which makes room in memory.
"""

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from armillary.checkpoint._in_place import find_containers, put_in_place
from armillary.checkpoint._packed import read_state
from armillary.checkpoint._selection import is_inside, show_parts, show_path
from armillary.cluster._join import get_peers
from armillary.distribute.program._flat_state import forget_everywhere
from armillary.state._slots import Slot

if TYPE_CHECKING:
    from armillary.checkpoint._checkpoint import Checkpoint


def put_all(
    checkpoint: "Checkpoint",
    leaves: Mapping[str, Any],
    states: Mapping[str, Any],
    may_differ: Collection[str] = (),
) -> dict[str, str]:
    """Puts values into all objects, or into none.

    Args:
        checkpoint: The objects.
        leaves: All of their arrays, by path.
        states: The states to set, by name of the object.
        may_differ: Parts that may refuse their state.

    Returns:
        The errors of the objects in `may_differ` that refused their state, by name.
    """
    slots = checkpoint.find_slots()
    before = [slot.read() for slot in slots]
    containers = find_containers(checkpoint.objects.values())
    undo: dict[str, Any] = {}
    try:
        # ORDER: arrays come first, so that `set_state` sees the new arrays.
        for slot in slots:
            _write(slot, [leaves[path] for path in slot.paths], containers)
        return _set_states(checkpoint, states, may_differ, undo)
    except BaseException as error:
        for slot, old in zip(slots, before, strict=True):
            _write(slot, old, containers)
        for name, state in reversed(undo.items()):
            try:
                checkpoint.states[name].set_state(state)
            except Exception as later_error:
                error.add_note(f"`{name}` was not set back: {later_error!r}")
        raise


def put_arrays(checkpoint: "Checkpoint", arrays: Mapping[str, Any]) -> None:
    """Puts some arrays into their places, by path, and lets go of the old ones."""
    containers = find_containers(checkpoint.objects.values())
    replaced: list[Any] = []
    for slot in checkpoint.find_slots():
        if arrays.keys().isdisjoint(slot.paths):
            continue
        before = dict(zip(slot.paths, slot.read(), strict=True))
        after = [arrays.get(path, old) for path, old in before.items()]
        _write(slot, after, containers)
        replaced += [old for path, old in before.items() if path in arrays]
    forget_everywhere(replaced)


def put_states(
    checkpoint: "Checkpoint", states: Mapping[str, Any], may_differ: Collection[str]
) -> dict[str, str]:
    """Sets the states of objects, after their arrays.

    Returns:
        The errors of the objects in `may_differ` that refused their state, by name.
    """
    return _set_states(checkpoint, states, may_differ, {})


def _write(slot: Slot, arrays: list[Any], containers: dict[int, int]) -> None:
    old = slot.get()
    slot.write(arrays)
    if id(slot.source) in containers:
        slot.put(put_in_place(old, slot.get(), containers))


def _set_states(
    checkpoint: "Checkpoint",
    states: Mapping[str, Any],
    may_differ: Collection[str],
    undo: dict[str, Any],
) -> dict[str, str]:
    """Sets the states; `undo` gets the state that each object had before."""
    refused: dict[str, str] = {}
    for name, state in states.items():
        value = checkpoint.states[name]
        undo[name] = read_state(name, value).unpack()
        try:
            value.set_state(state)
        except Exception as error:
            may_refuse = is_inside(name, may_differ)
            if not (may_refuse and isinstance(error, ValueError)):
                error.add_note(_explain_refusal(checkpoint, name, may_differ))
                raise
            refused[name] = str(error)

    if any(is_inside(name, may_differ) for name in states):
        texts = get_peers().gather("states that do not fit", json.dumps(refused))
        for text in texts:
            refused |= json.loads(text)
    for name in refused:
        checkpoint.states[name].set_state(undo[name])
    return refused


def _explain_refusal(
    checkpoint: "Checkpoint", name: str, may_differ: Collection[str]
) -> str:
    parts = show_parts({name, *may_differ})
    manager = f"`CheckpointManager(..., may_differ={parts})`"
    positions = checkpoint.data_positions
    if name in positions:
        return (
            f"That is `{show_path(name, positions)}`, so nothing was restored. If the "
            f"data changed on purpose, write {manager}. It restores the arrays, and "
            "the data begins at its start. For a new run, use a new directory."
        )
    return (
        f"That is `{name}`, so nothing was restored. If it changed on purpose, it can "
        f"stay as the program makes it: {manager}."
    )
