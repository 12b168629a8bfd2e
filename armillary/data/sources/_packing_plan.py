"""Plans that pack pieces of documents into rows, from their lengths alone.

Every process holds the plan of all documents, so its numbers have 32 bits if they fit.
"""

import bisect
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class PackingPlan:
    """The pieces of each row.

    Row `i` has the pieces `bounds[i]` to `bounds[i + 1] - 1`, from left to right. The
    other arrays have an entry for each piece.

    Attributes:
        bounds: The first piece of each row, and the number of pieces.
        documents: The number of the document.
        starts: The place in the document where the piece begins.
        sizes: The number of tokens, at least 1.
    """

    bounds: np.ndarray
    documents: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.bounds) - 1


def make_plan(
    lengths: np.ndarray, row_length: int, window: int | None = None
) -> PackingPlan:
    """Returns the plan for documents of some lengths.

    Longer documents are cut into full rows and a rest. In each window, pieces are
    placed by *best-fit decreasing*: from the longest to the shortest, each into the
    row with the least room that is enough.

    Args:
        lengths: The length of each document, in the order of the documents.
        row_length: The length of a row.
        window: The number of neighboring documents that may share rows; None for all.
    """
    longest = int(lengths.max(initial=0))
    lengths = lengths.astype(find_dtype(longest + row_length), copy=False)
    documents, starts, sizes = _cut(lengths, row_length)

    window = window or max(1, len(lengths))
    rows = np.empty(len(sizes), documents.dtype)
    num_rows = 0
    for first in range(0, len(lengths), window):
        begin, end = np.searchsorted(documents, [first, first + window])
        own, count = _fit(sizes[begin:end], row_length)
        rows[begin:end] = own + num_rows
        num_rows += count

    bounds = np.zeros(num_rows + 1, documents.dtype)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=bounds[1:])
    order = np.argsort(rows, kind="stable")
    return PackingPlan(bounds, documents[order], starts[order], sizes[order])


def find_dtype(most: int) -> Any:
    """Returns the smallest of the usual integer types that holds a number."""
    return np.int32 if most <= np.iinfo(np.int32).max else np.int64


def _cut(
    lengths: np.ndarray, row_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the document, the start and the size of each piece of all documents."""
    num_pieces = -(-lengths // row_length)  # rounded up
    count = int(num_pieces.sum())
    kind = find_dtype(max(count, len(lengths)))
    documents = np.repeat(np.arange(len(lengths), dtype=kind), num_pieces)

    # The number of each piece in its document, and then its place there.
    firsts = np.cumsum(num_pieces, dtype=kind) - num_pieces
    numbers = np.arange(count, dtype=kind) - firsts[documents]
    starts = numbers.astype(lengths.dtype)
    starts *= row_length
    sizes = np.minimum(lengths[documents] - starts, row_length)
    return documents, starts, sizes


class _Rooms:
    """The rows that are not full, by their room."""

    def __init__(self) -> None:
        self._rows: dict[int, np.ndarray] = {}
        self._rooms: list[int] = []  # the keys of `_rows`, rising

    def put(self, rows: np.ndarray, room: int) -> None:
        """Adds rows that have this room, if they have any."""
        if not len(rows) or not room:
            return
        others = self._rows.get(room)
        if others is None:
            bisect.insort(self._rooms, room)
            self._rows[room] = rows
        else:
            self._rows[room] = np.concatenate([others, rows])

    def take(self, size: int) -> tuple[np.ndarray, int] | None:
        """Removes the rows with the least room for `size`; returns them and the room.

        Returns `None` if no row has enough room.
        """
        place = bisect.bisect_left(self._rooms, size)
        if place == len(self._rooms):
            return None
        room = self._rooms.pop(place)
        return self._rows.pop(room), room


def _fit(sizes: np.ndarray, row_length: int) -> tuple[np.ndarray, int]:
    """Returns the row of each piece, and the number of rows.

    Pieces of one size are placed together. The row with the least room that is enough
    remains this row until it is full, so it takes as many of these pieces as fit.
    """
    kind = find_dtype(len(sizes))
    rows = np.empty(len(sizes), kind)
    num_rows = 0
    rooms = _Rooms()
    for pieces in _group_by_size(sizes):
        size = int(sizes[pieces[0]])
        while len(pieces):
            found = rooms.take(size)
            if found is None:
                num_new = _divide_up(len(pieces), row_length // size)
                new = np.arange(num_rows, num_rows + num_new, dtype=kind)
                num_rows += num_new
                found = (new, row_length)

            targets, room = found
            in_each = room // size
            num_used = min(len(targets), _divide_up(len(pieces), in_each))
            num_placed = min(len(pieces), num_used * in_each)
            used = targets[:num_used]
            rows[pieces[:num_placed]] = np.repeat(used, in_each)[:num_placed]
            pieces = pieces[num_placed:]

            # Only the last row may have got fewer pieces than fit.
            in_last = num_placed - (num_used - 1) * in_each
            rooms.put(targets[num_used:], room)
            rooms.put(used[:-1], room - in_each * size)
            rooms.put(used[-1:], room - in_last * size)
    return rows, num_rows


def _group_by_size(sizes: np.ndarray) -> list[np.ndarray]:
    """Returns the numbers of the pieces of each size, the largest size first."""
    if not len(sizes):
        return []
    order = np.argsort(-sizes, kind="stable").astype(find_dtype(len(sizes)))
    ends = np.flatnonzero(np.diff(sizes[order])) + 1
    return np.split(order, ends)


def _divide_up(number: int, divisor: int) -> int:
    """Returns a quotient, rounded up."""
    return -(-number // divisor)
