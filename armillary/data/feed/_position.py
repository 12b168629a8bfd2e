"""A place in a data set: what is stored, and its form that JSON can hold."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from armillary._checks import list_lines
from armillary.errors import DatasetStateError

_KEYS = ("kind", "epoch", "source", "exhausted", "full_size")


@dataclass(frozen=True)
class Position:
    """A place between two batches.

    Args:
        epoch: Which pass over the source, from 0.
        source: The source's own state, or None at the start of a pass.
        full_size: Size of the pass's first batch, which the remainder options compare
            others with, or None before any batch.
        is_exhausted: Whether the pass is over.
    """

    epoch: int = 0
    source: Any = None
    full_size: int | None = None
    is_exhausted: bool = False

    @property
    def is_between_passes(self) -> bool:
        """Whether it is the same place in any order of any data."""
        return self.source is None or self.is_exhausted


def encode_position(position: Position, kind: str) -> dict[str, Any]:
    """Returns `position` as a dictionary that `json.dumps` accepts."""
    return {
        "kind": kind,
        "epoch": position.epoch,
        "source": _encode(position.source, kind),
        "exhausted": position.is_exhausted,
        "full_size": position.full_size,
    }


def decode_position(state: Any, kind: str) -> Position:
    """Returns the position that `encode_position` wrote."""
    is_whole = isinstance(state, dict) and state.keys() >= set(_KEYS)
    counts = [state["epoch"], state["full_size"] or 0] if is_whole else [-1]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise DatasetStateError(
            f"`state` is {state!r:.200}, but a data position is a dictionary with the "
            f"keys {', '.join(_KEYS)}. Pass what `get_state` of a distributed dataset "
            "returned."
        )
    if state["kind"] != kind:
        raise DatasetStateError(
            f"`state` was saved from another kind of source: {state['kind']}, and not "
            f"{kind}. Build the dataset from the same kind of source, or leave it out "
            "of the checkpoint."
        )
    source, is_exhausted = _decode(state["source"]), bool(state["exhausted"])
    return Position(state["epoch"], source, state["full_size"], is_exhausted)


def check_same_order(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises if a position belongs to another order of examples than the program's.

    What only one of them knows is not compared: an older release saved less.
    """
    lines = [
        f"{name}: {saved[name]} in the state, {own[name]} in the program"
        for name in own
        if name in saved and saved[name] != own[name]
    ]
    if lines:
        raise DatasetStateError(
            "`state` was saved from other data, or from another order of them, in "
            f"which its position is another place:\n{list_lines(lines)}\n"
            "Pass the data and the seed that the state was saved with. To go on in a "
            "checkpoint with other ones, from their beginning, name them in its "
            'manager: `CheckpointManager(..., may_differ="train_dataset")`.'
        )


def _encode(value: Any, kind: str) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return {"__bytes__": base64.b64encode(value).decode("ascii")}
        case np.generic():
            return value.item()
        case np.ndarray():
            return {"__array__": value.tolist(), "dtype": str(value.dtype)}
        case list():
            return [_encode(item, kind) for item in value]
        case tuple():
            return {"__tuple__": [_encode(item, kind) for item in value]}
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _encode(item, kind) for key, item in value.items()}
    raise DatasetStateError(
        f"`get_state` of the source ({kind}) returned {value!r:.80} of type "
        f"{type(value).__name__}, but a position must be made of what JSON can hold. "
        "Return numbers, strings, bytes, arrays, and lists and dictionaries of them."
    )


def _decode(value: Any) -> Any:
    match value:
        case list():
            return [_decode(item) for item in value]
        case {"__bytes__": text, **rest} if not rest:
            return base64.b64decode(text)
        case {"__array__": items, "dtype": dtype, **rest} if not rest:
            return np.array(items, dtype)
        case {"__tuple__": items, **rest} if not rest:
            return tuple(_decode(items))
        case dict():
            return {key: _decode(item) for key, item in value.items()}
    return value
