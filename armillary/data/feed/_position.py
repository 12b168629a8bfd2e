"""A place in a data set: what is stored, and its form that JSON can hold.

One pass over a source: checked batches, each with the position after it.
"""

import base64
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from armillary._checks import list_lines
from armillary.data.sources._batch import as_device_values, check_batch
from armillary.data.sources._source import Source
from armillary.errors import DatasetStateError
from armillary.typing import PyTree

_BYTES_KEY, _ARRAY_KEY, _TUPLE_KEY = "__bytes__", "__array__", "__tuple__"
_REQUIRED = ("kind", "epoch", "source", "exhausted", "full_size")


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
    is_dict = isinstance(state, dict)
    missing = [key for key in _REQUIRED if key not in state] if is_dict else []
    if not is_dict or missing:
        found = f"it lacks {', '.join(missing)}" if missing else "it is no dictionary"
        raise DatasetStateError(
            f"`state` is {state!r:.200}, but a data position has the keys "
            f"{', '.join(_REQUIRED)}: {found}. Pass what `get_state` of a distributed "
            "dataset returned."
        )
    if state["kind"] != kind:
        raise DatasetStateError(
            "`state` was saved from another kind of source.\n"
            f"  in the state:   {state['kind']}\n"
            f"  in the program: {kind}\n"
            "Build the dataset from the same kind of source, or leave the dataset out "
            "of the checkpoint."
        )
    epoch, full_size = state["epoch"], state["full_size"]
    if not _is_count(epoch) or not (full_size is None or _is_count(full_size)):
        raise DatasetStateError(
            f"`state` has the epoch {epoch!r} and the full size {full_size!r}, but "
            "both must be integers that are not negative. Pass what `get_state` of a "
            "distributed dataset returned."
        )
    return Position(
        epoch, _decode(state["source"]), full_size, bool(state["exhausted"])
    )


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


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _encode(value: Any, kind: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {_BYTES_KEY: base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {_ARRAY_KEY: value.tolist(), "dtype": str(value.dtype)}
    if isinstance(value, list):
        return [_encode(item, kind) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE_KEY: [_encode(item, kind) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode(item, kind) for key, item in value.items()}
    raise DatasetStateError(
        f"`get_state` of the source ({kind}) returned {value!r:.80} of type "
        f"{type(value).__name__}, but a position must be made of what JSON can hold. "
        "Return numbers, strings, bytes, arrays, and lists and dictionaries of them."
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        if set(value) == {_BYTES_KEY}:
            return base64.b64decode(value[_BYTES_KEY])
        if set(value) == {_ARRAY_KEY, "dtype"}:
            return np.array(value[_ARRAY_KEY], value["dtype"])
        if set(value) == {_TUPLE_KEY}:
            return tuple(_decode(value[_TUPLE_KEY]))
        return {key: _decode(item) for key, item in value.items()}
    return value


class SourceBatch(NamedTuple):
    """One batch of the source, with NumPy leaves of equal leading size.

    They have the dtypes that they have on a device.
    """

    arrays: PyTree
    num_rows: int


class BatchStream:
    """Reads one pass of `source` from `position` on.

    Batches without rows are left out: they hold no example.

    Args:
        source: Where the batches come from.
        position: Where to begin. `position.is_exhausted` gives a stream at its end.

    Raises:
        DatasetStateError: If the source does not accept the position.
    """

    def __init__(self, source: Source, position: Position) -> None:
        self._source = source
        self._iterator: Any = None
        self._has_positions = source.is_repositionable
        self._peeked: list[tuple[SourceBatch, Position]] = []
        self._num_read = 0
        self.full_size = source.full_size or position.full_size
        self.element_spec: PyTree | None = None
        """Shapes and dtypes of the first batch, once it was read."""
        self.position = position
        """The position after the last batch that `next` returned."""
        if not position.is_exhausted:
            self._iterator = _open_iterator(source, position)

    def __iter__(self) -> "BatchStream":
        return self

    def __next__(self) -> SourceBatch:
        batch = self.peek()
        if batch is None:
            raise StopIteration
        self.position = self._peeked.pop(0)[1]
        return batch

    def peek(self) -> SourceBatch | None:
        """Returns the next batch without taking it, or None at the end."""
        while not self._peeked and self._iterator is not None:
            self._read()
        return self._peeked[0][0] if self._peeked else None

    def _read(self) -> None:
        """Reads one batch; if it has rows, it is the next one to hand out."""
        try:
            raw = next(self._iterator)
        except StopIteration:
            self._iterator = None
            return
        self._num_read += 1
        arrays, num_rows = check_batch(raw, self._name_batch)
        if not num_rows:
            return
        arrays = as_device_values(arrays, self._name_batch)
        if self.full_size is None:
            self.full_size = num_rows
        if self.element_spec is None:
            self.element_spec = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays
            )
        state = self._iterator.get_state() if self._has_positions else None
        position = Position(self.position.epoch, state, self.full_size)
        self._peeked.append((SourceBatch(arrays, num_rows), position))

    def _name_batch(self) -> str:
        return f"Batch {self._num_read - 1} of the source ({self._source.name})"


def _open_iterator(source: Source, position: Position) -> Any:
    iterator = source.make_iterator(position.epoch)
    if position.source is not None:
        try:
            # Iterators may keep the state and change it as they move on.
            iterator.set_state(copy.deepcopy(position.source))
        except DatasetStateError:
            raise
        except Exception as error:
            raise DatasetStateError(
                f"`state` does not fit the source ({source.name}).\n"
                f"  in the state:    {position.source!r:.300}\n"
                f"  the source says: {type(error).__name__}: {error}\n"
                "Build the data set as it was when the state was saved, or leave the "
                "dataset out of the checkpoint."
            ) from error
    return iterator
