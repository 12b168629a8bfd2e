"""A place between two batches of a source, as checkpoints save it."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from armillary._checks import list_lines
from armillary._logging import logger
from armillary.errors import DatasetStateError


@dataclass(frozen=True)
class Position:
    """A place between two batches."""

    epoch: int = 0  # the number of the pass over the source
    source: Any = None  # the source's own state; None at the start of a pass
    full_size: int | None = None  # the size of the first batch, for `remainder`
    is_exhausted: bool = False  # whether the pass is over

    @property
    def is_between_passes(self) -> bool:
        """True if the position does not depend on the order of the data."""
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


def decode_position(state: Mapping[str, Any], kind: str) -> Position:
    if state.get("kind") != kind:
        raise DatasetStateError(
            f"`state` was saved from another kind of source: {state.get('kind')}, and "
            f"not {kind}. Build the dataset from the same kind of source, or leave it "
            "out of the checkpoint."
        )
    source = _decode(state["source"])
    return Position(state["epoch"], source, state["full_size"], state["exhausted"])


def check_same_order(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises if a position belongs to another order of examples than the program's."""
    # Only values that both have are compared, because older releases saved fewer.
    lines = [
        f"{name}: {saved[name]} in the state, {own[name]} in the program"
        for name in own
        if name in saved and saved[name] != own[name]
    ]
    if lines:
        raise DatasetStateError(
            "`state` was saved from other data, or from another order of the data, so "
            f"its position would be wrong here:\n{list_lines(lines)}\n"
            "Pass the data and the seed that the state was saved with."
        )


def log_new_size(saved: int | None, own: int | None, kind: str) -> None:
    """Logs that batches have another size than at a save, if both sizes are known."""
    if saved is None or own is None or saved == own:
        return
    logger.info(
        "the batch was %d at the save and is %d now (%s): the data continues at the "
        "same example, but steps, schedules and epochs count differently.",
        saved,
        own,
        kind,
    )


def _encode(value: Any, kind: str) -> Any:
    """Returns a value of a source in types of JSON, with a tag if its type is lost."""
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
        f"{type(value).__name__}, which a position cannot hold. Return numbers, "
        "strings, bytes, arrays, and lists and dictionaries of them."
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
