"""Chunks: the batches of many steps, stacked for one device call."""

import contextlib
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from armillary._checks import list_lines
from armillary.data._layout import Active, describe_active
from armillary.data.feed._gather import Gather
from armillary.data.feed._piece import Piece
from armillary.data.feed._position import Position
from armillary.data.feed._reader import BatchReader
from armillary.data.sources._batch import describe_shapes
from armillary.data.sources._stale import reading_ahead
from armillary.data.sources._take import empty_aligned
from armillary.errors import BatchSizeError
from armillary.typing import PyTree

Step = list[list[Piece]]
"""For each reader, the batches that one step takes from it."""


@dataclass(eq=False, kw_only=True)
class Chunk:
    """The batches of `num_steps` steps on the device.

    Lists have an item for each reader. Leaves of `arrays` have shape
    `(capacity * batches_per_step, ...)`, followed by the layout's shape. Batch b of
    step s is at index `s * batches_per_step + b`, for `Gather.on_device`. Steps from
    `num_steps` on have no data, and must not run.
    """

    arrays: list[PyTree]
    resident: list[PyTree]  # the arrays of the data that stay on the device
    types: list[PyTree]  # the types of one batch as a step receives it
    num_steps: int = 0
    capacity: int  # room for steps, equal for all chunks of one signature
    signature: Hashable  # equal for chunks that one program can run
    active: tuple[Active, ...]  # the replicas that have data
    num_replicas: tuple[int, ...]  # the number of replicas that share a batch
    positions: list[tuple[Position, ...]] = field(default_factory=list)  # after steps
    ends: list[bool] = field(default_factory=list)  # whether a step ends its batch
    marks: tuple[str, ...] = ()  # of the first batches, if processes compare them

    @property
    def inputs(self) -> list[tuple[PyTree, PyTree]]:
        """The inputs of a program for each reader: its arrays, and resident arrays."""
        return list(zip(self.arrays, self.resident, strict=True))

    def __str__(self) -> str:
        """Describes the chunk; the text is equal if processes may run it together."""
        shapes = "; ".join(describe_shapes(types) for types in self.types)
        active = ", ".join(map(describe_active, self.active))
        text = f"{self.num_steps} steps of {shapes}; replicas with data: {active}"
        marks = ", ".join(filter(None, self.marks))
        return f"{text}; checksum of the first examples: {marks}" if marks else text


class ChunkBuilder:
    """Stacks and places the batches of many steps, in at most `max_chunk_bytes`."""

    def __init__(
        self,
        batches_per_step: Sequence[int],
        *,
        steps_per_chunk: int,
        max_chunk_bytes: int = 256 * 2**20,
        gives_errors_at_once: bool = False,
        reads_ahead: bool = False,
    ) -> None:
        self._batches_per_step = tuple(batches_per_step)
        self._steps_per_chunk = steps_per_chunk
        self._max_chunk_bytes = max_chunk_bytes
        self._gives_errors_at_once = gives_errors_at_once
        self._reading = reading_ahead if reads_ahead else contextlib.nullcontext
        # By signature. The first chunk of each signature sets its capacity.
        self._capacities: dict[Hashable, int] = {}

    def build(self, readers: Sequence[BatchReader]) -> Iterator[Chunk]:
        """Yields chunks until a step lacks data."""
        step = self._read_step(readers)
        while step is not None:
            chunk = self._begin(readers, step)
            step, error = self._fill(readers, chunk, step)
            self._place(readers, chunk)
            yield chunk
            del chunk  # Its host memory must be free before the next chunk is built.
            if error is not None:
                raise error
            if step is None:
                step = self._read_step(readers)

    def _read_step(self, readers: Sequence[BatchReader]) -> Step | None:
        """Returns the batches of one step, or None if the data ends before."""
        step: Step = []
        for reader, count in zip(readers, self._batches_per_step, strict=True):
            with self._reading():
                batches = list(itertools.islice(reader, count))
            if len(batches) < count:
                return None
            step.append(batches)
        check_pieces(step)
        return step

    def _begin(self, readers: Sequence[BatchReader], step: Step) -> Chunk:
        """Returns a chunk with room for `step`, and for more steps if they fit."""
        signature = _sign(step)
        gathers = [reader.data.gather for reader in readers]
        for index, gather in enumerate(gathers):
            is_uneven = len(set(signature[index])) > 1
            if is_uneven:
                raise _explain_uneven(index, gather, step[index])

        firsts = [batches[0] for batches in step]
        pairs = list(zip(gathers, firsts, strict=True))
        capacity = self._capacities.get(signature)
        if capacity is None:
            sent_types = [gather.types(first, as_sent=True) for gather, first in pairs]
            capacity = self.count_steps(sent_types)
        arrays: list[PyTree] = []
        for first, count in zip(firsts, self._batches_per_step, strict=True):
            arrays.append(_make_buffers(first.arrays, capacity * count))
        return Chunk(
            arrays=arrays,
            resident=[gather.resident for gather in gathers],
            types=[gather.types(first) for gather, first in pairs],
            capacity=capacity,
            signature=signature,
            active=tuple(first.active for first in firsts),
            num_replicas=tuple(first.num_replicas for first in firsts),
            marks=tuple(first.mark for first in firsts),
        )

    def count_steps(self, sent_types: Sequence[PyTree]) -> int:
        """Returns the number of steps that fit into a chunk.

        Args:
            sent_types: The types of the arrays that are sent for one batch.
        """
        num_bytes = 0
        for count, types in zip(self._batches_per_step, sent_types, strict=True):
            for leaf in jax.tree.leaves(types):
                num_bytes += count * leaf.size * leaf.dtype.itemsize
        num_steps = self._max_chunk_bytes // max(1, num_bytes)
        return max(1, min(self._steps_per_chunk, num_steps))

    def _fill(
        self, readers: Sequence[BatchReader], chunk: Chunk, step: Step
    ) -> tuple[Step | None, Exception | None]:
        """Copies steps into a chunk; returns the first that does not fit, or errors."""
        while True:
            _add_step(chunk, step)
            if chunk.num_steps == chunk.capacity:
                return None, None
            try:
                following = self._read_step(readers)
            except Exception as error:
                if self._gives_errors_at_once:
                    raise
                return None, error
            if following is None or _sign(following) != chunk.signature:
                return following, None
            step = following

    def _place(self, readers: Sequence[BatchReader], chunk: Chunk) -> None:
        """Makes device arrays of the buffers, zero where there is no data."""
        # If the data ended inside the first chunk, no later chunk has more steps.
        chunk.capacity = self._capacities.setdefault(chunk.signature, chunk.num_steps)
        for index, count in enumerate(self._batches_per_step):
            num_filled = chunk.num_steps * count
            num_sent = chunk.capacity * count

            def trim(
                buffer: np.ndarray, filled: int = num_filled, sent: int = num_sent
            ) -> np.ndarray:
                buffer[filled:] = 0
                return buffer[:sent]

            arrays = jax.tree.map(trim, chunk.arrays[index])
            num_replicas = chunk.num_replicas[index]
            gather = readers[index].data.gather
            chunk.arrays[index] = gather.send(arrays, 1, num_replicas, num_filled)


def _explain_uneven(
    index: int, gather: Gather, batches: Sequence[Piece]
) -> BatchSizeError:
    """Returns the error for batches of one step that have different shapes."""
    lines: list[str] = []
    for batch in batches:
        shapes = describe_shapes(gather.types(batch))
        lines.append(f"{shapes} on {describe_active(batch.active)} replicas")
    shown = list_lines(lines)
    return BatchSizeError(
        f"One step takes {len(batches)} batches of dataset {index}, and they must have "
        f"one shape, but they differ:\n{shown}\nUse "
        '`InputOptions(remainder="drop")` or `remainder="pad"`.'
    )


def _make_buffers(arrays: PyTree, size: int) -> PyTree:
    """Returns memory for `size` batches like `arrays`.

    Each chunk has memory of its own, because devices may share it for long.
    """

    def make_buffer(leaf: np.ndarray) -> np.ndarray:
        return empty_aligned((size, *leaf.shape), leaf.dtype)

    return jax.tree.map(make_buffer, arrays)


def _add_step(chunk: Chunk, step: Step) -> None:
    """Copies the batches of one step into a chunk."""
    for buffers, batches in zip(chunk.arrays, step, strict=True):
        leaves = jax.tree.leaves(buffers)
        start = chunk.num_steps * len(batches)
        for index, batch in enumerate(batches, start):
            parts = jax.tree.leaves(batch.arrays)
            for buffer, part in zip(leaves, parts, strict=True):
                buffer[index] = part

    lasts = [batches[-1] for batches in step]
    chunk.positions.append(tuple(last.position for last in lasts))
    chunk.ends.append(all(last.is_last for last in lasts))
    chunk.num_steps += 1


def check_pieces(step: Step) -> None:
    """Raises if only some of the batches that a step takes are cut into pieces."""
    ends = [batch.is_last for batches in step for batch in batches]
    if len(ends) == 1 or all(ends):
        return
    is_several = len(ends) > len(step)
    if not any(ends) and not is_several:
        return  # One batch of each dataset, and all are cut.

    are_whole = [all(batch.is_last for batch in batches) for batches in step]
    cut = are_whole.index(False)
    raise BatchSizeError(
        f"A step takes {len(ends)} batches together, but the replicas cannot share a "
        f"batch of dataset {cut} equally. It would run in pieces, and examples would "
        "be paired differently than on one replica. Use batch sizes that are multiples "
        'of the number of replicas, or `InputOptions(remainder="pad")` or `"drop"`.'
    )


def _sign(step: Step) -> tuple[tuple[Hashable, ...], ...]:
    """Returns the signature of a step: one for each batch of each dataset."""
    return tuple(tuple(batch.signature for batch in batches) for batches in step)
