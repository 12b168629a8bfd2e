"""What a step must not do to the places of a state, and how errors say so."""

from collections.abc import Sequence

from jax.core import Tracer

from armillary._checks import list_lines
from armillary.state._holders import ABSENT
from armillary.state._place import PlaceSlot
from armillary.state._slots import Slot, describe
from armillary.state._walk import Walk

_MADE = "made by the step, so nothing carries it to the next one"
_MADE_ANEW = (
    "in a new object that the step made, while the loop carries what the old one "
    "holds: assign to that (`variable[...] = value`, `setattr`), or make its class a "
    "pytree (`jax.tree_util.register_dataclass`), so that a new value takes its place"
)
_LOST = (
    "the step put an array into a name, a tuple or a function, which nothing carries "
    "to the next step: hold it in an attribute or a variable"
)


_FINAL = (
    "Make every place in the constructor with its final shape and dtype (an array, "
    "`jnp.zeros(...)`, where it counts), and cast before assigning "
    "(`value.astype(jnp.float32)`)."
)
_ONE_VALUE = (
    "A `PerReplica` holds a value for each replica, as `strategy.run` returns them. "
    'Reduce it in the step (`armillary.all_reduce("mean", gradients)`), so that all '
    'have the same, and take that one: `strategy.reduce("mean", value)`.'
)


def find_new_places(slots: Sequence[Slot], now: Walk, before: Walk) -> list[str]:
    """Returns what is wrong with places that a step put arrays into, by two walks."""
    keys = {slot.key for slot in slots}
    made = [slot for key, slot in now.slots.items() if key not in keys]
    lost = [path for path, array in now.constants if isinstance(array, Tracer)]
    if not (made or lost):
        return []
    paths = {slot.path for slot in slots}
    return [
        *(
            f"{slot.path}: "
            f"{_MADE_ANEW if slot.path in paths else _describe(slot, before)}"
            for slot in made
        ),
        *(f"{path}: {_LOST}" for path in lost),
    ]


def _describe(slot: Slot, walk: Walk) -> str:
    """Returns what a step did to make a slot."""
    if not isinstance(slot, PlaceSlot):
        return _MADE
    part = walk.part_of(slot.part.source)
    before = ABSENT if part is None else part.held.get(slot.name, ABSENT)
    if before is ABSENT:
        return _MADE
    if before is slot.get():
        kind = type(before).__name__
        return f"the step put an array into this {kind}, which held none before"
    arrays = slot.read()
    is_one = slot.paths == (slot.path,)
    became = describe(arrays[0]) if is_one else "a nest of arrays"
    return f"held `{before!r:.60}` before the step, and {became} after it"


def changed_message(step_name: str, changes: Sequence[str], num_places: int) -> str:
    """Returns what is wrong with a step that left other places than it found."""
    lines = "\n".join(f"  {change}" for change in changes)
    way_out = _ONE_VALUE if "PerReplica" in lines else _FINAL
    return (
        f"`{step_name}` changed {len(changes)} of {num_places} slots, and a compiled "
        "loop needs the same places with the same shape and dtype after every step:\n"
        f"{lines}\n{way_out}"
    )


def unsettled_message(step_name: str, changes: dict[str, str]) -> str:
    """Returns what is wrong with a step that would not do the same a second time."""
    lines = [
        f"{path}: {change}, once, while the step was traced"
        for path, change in sorted(changes.items())
    ]
    return (
        f"`{step_name}` changed plain values, so that the next step would be another "
        f"one, and a compiled loop runs Python only once:\n"
        f"{list_lines(lines, most=10)}\n"
        "Hold what a step counts or decides by in an array (`jnp.zeros(...)`, "
        "`jnp.where`), and set what is set once in `__init__` or `train_loop_begin`."
    )
