"""Chunks: the batches of many steps, stacked for one device call.

A step takes `batches_per_step[i]` batches of reader i. A chunk holds steps whose
batches have one structure and one shape, so that one program can run them.
"""

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from armillary._checks import check_positive_int, list_lines
from armillary.data._layout import Active
from armillary.data.feed._gather import empty_aligned
from armillary.data.feed._position import Position
from armillary.data.feed._reader import BatchReader
from armillary.data.feed._split import Piece
from armillary.data.sources._batch import describe_shapes
from armillary.errors import BatchSizeError
from armillary.typing import PyTree

Step = list[list[Piece]]
"""For each reader, the batches that one step takes of it."""


@dataclass(eq=False, kw_only=True)
class Chunk:
    """The batches of `num_steps` steps, on the device.

    Args:
        arrays: For each reader, a pytree whose leaves have shape
            `(capacity * batches_per_step, ...)`, then the layout's shape. Batch b of
            step s is at index `s * batches_per_step + b`, for `Gather.on_device`.
            Steps from `num_steps` on are no data and must not run.
        resident: For each reader, the arrays of its data that stay on the device.
        types: For each reader, shapes and dtypes of one batch as a step receives it.
        num_steps: Steps that have data.
        capacity: Steps for which there is room; the same for all chunks of a signature.
        signature: Equal for chunks that one program can run.
        num_active: For each reader, which replicas have data.
        num_replicas: For each reader, how many replicas share a batch.
        positions: For each step, the position of each reader after it.
        ends: For each step, whether no piece of its batches follows.
    """

    arrays: list[PyTree]
    resident: list[PyTree]
    types: list[PyTree]
    num_steps: int = 0
    capacity: int
    signature: Hashable
    num_active: tuple[Active, ...]
    num_replicas: tuple[int, ...]
    positions: list[tuple[Position, ...]] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)

    @property
    def inputs(self) -> list[tuple[PyTree, PyTree]]:
        """What a program takes for each reader: its arrays, and those that stay."""
        return list(zip(self.arrays, self.resident, strict=True))

    def __str__(self) -> str:
        """Describes the chunk; equal for those that processes may run together."""
        shapes = "; ".join(describe_shapes(types) for types in self.types)
        active = ", ".join(map(str, self.num_active))
        return f"{self.num_steps} steps of {shapes}; replicas with data: {active}"


class ChunkBuilder:
    """Stacks and places the batches of many steps.

    Args:
        batches_per_step: For each reader, how many of its batches one step takes.
        steps_per_chunk: Most steps in one chunk.
        max_chunk_bytes: Most host memory of one chunk, which has at least one step.
        gives_errors_at_once: Whether the steps that were read before an error are lost,
            instead of being given out first.
    """

    def __init__(
        self,
        batches_per_step: Sequence[int],
        *,
        steps_per_chunk: int,
        max_chunk_bytes: int = 256 * 2**20,
        gives_errors_at_once: bool = False,
    ) -> None:
        self._batches_per_step = [
            check_positive_int("batches_per_step", count) for count in batches_per_step
        ]
        self._steps_per_chunk = check_positive_int("steps_per_chunk", steps_per_chunk)
        self._max_chunk_bytes = check_positive_int("max_chunk_bytes", max_chunk_bytes)
        self._gives_errors_at_once = gives_errors_at_once
        # By signature. The first chunk of each decides.
        self._capacities: dict[Hashable, int] = {}

    def build(self, readers: Sequence[BatchReader]) -> Iterator[Chunk]:
        """Yields chunks until a step lacks data."""
        step = self._read_step(readers)
        while step is not None:
            chunk = self._begin(readers, step)
            step, error = self._fill(readers, chunk, step)
            self._place(readers, chunk)
            yield chunk
            del chunk  # The next one must not find its host memory still held.
            if error is not None:
                raise error
            if step is None:
                step = self._read_step(readers)

    def _read_step(self, readers: Sequence[BatchReader]) -> Step | None:
        """Returns the batches of one step, or None if the data ends before."""
        step: Step = []
        pairs = zip(readers, self._batches_per_step, strict=True)
        for index, (reader, count) in enumerate(pairs):
            batches = list(itertools.islice(reader, count))
            if len(batches) < count:
                return None
            _check_equal_shapes(reader, batches, index)
            step.append(batches)
        return step

    def _begin(self, readers: Sequence[BatchReader], step: Step) -> Chunk:
        """Returns a chunk with room for `step`, and for those that fit behind it."""
        signature, gathers = _sign(step), [reader.gather for reader in readers]
        firsts = [batches[0] for batches in step]
        pairs = list(zip(gathers, firsts, strict=True))
        capacity = self._capacities.get(signature) or self.count_steps(
            [gather.sent_types(first) for gather, first in pairs]
        )
        # Each chunk has memory of its own: devices may share it for long.
        arrays = [
            jax.tree.map(
                lambda leaf, size=capacity * count: empty_aligned(
                    (size, *leaf.shape), leaf.dtype
                ),
                first.arrays,
            )
            for first, count in zip(firsts, self._batches_per_step, strict=True)
        ]
        return Chunk(
            arrays=arrays,
            resident=[gather.resident for gather in gathers],
            types=[gather.types(first) for gather, first in pairs],
            capacity=capacity,
            signature=signature,
            num_active=tuple(first.num_active for first in firsts),
            num_replicas=tuple(first.num_replicas for first in firsts),
        )

    def count_steps(self, sent_types: Sequence[PyTree]) -> int:
        """Returns how many steps fit into a chunk, by what travels for each batch."""
        num_bytes = sum(
            count * leaf.size * leaf.dtype.itemsize
            for count, types in zip(self._batches_per_step, sent_types, strict=True)
            for leaf in jax.tree.leaves(types)
        )
        num_steps = self._max_chunk_bytes // max(1, num_bytes)
        return max(1, min(self._steps_per_chunk, num_steps))

    def _fill(
        self, readers: Sequence[BatchReader], chunk: Chunk, step: Step
    ) -> tuple[Step | None, Exception | None]:
        """Copies steps in; returns the first that does not fit, or an error."""
        while True:
            for buffers, batches in zip(chunk.arrays, step, strict=True):
                leaves = jax.tree.leaves(buffers)
                for index, batch in enumerate(batches, chunk.num_steps * len(batches)):
                    parts = jax.tree.leaves(batch.arrays)
                    for buffer, part in zip(leaves, parts, strict=True):
                        buffer[index] = part
            chunk.positions.append(tuple(batches[-1].position for batches in step))
            chunk.ends.append(all(batches[-1].is_last for batches in step))
            chunk.num_steps += 1
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
        # No later chunk has more steps of this shape if the data ended inside it.
        chunk.capacity = self._capacities.setdefault(chunk.signature, chunk.num_steps)
        for index, count in enumerate(self._batches_per_step):

            def trim(buffer: np.ndarray, count: int = count) -> np.ndarray:
                buffer[chunk.num_steps * count :] = 0
                return buffer[: chunk.capacity * count]

            arrays = jax.tree.map(trim, chunk.arrays[index])
            chunk.arrays[index] = readers[index].gather.send(
                arrays, 1, chunk.num_replicas[index]
            )


def _sign(step: Step) -> tuple[Hashable, ...]:
    return tuple(batches[0].signature for batches in step)


def _check_equal_shapes(reader: BatchReader, batches: list[Piece], index: int) -> None:
    if len(batches) > 1 and len({batch.signature for batch in batches}) > 1:
        shown = list_lines(
            f"{describe_shapes(reader.gather.types(batch))} on {batch.num_active} "
            "replicas"
            for batch in batches
        )
        raise BatchSizeError(
            f"One step takes {len(batches)} batches of dataset {index}, and they must "
            f"have one shape, but they differ:\n{shown}\n"
            "Use `drop_remainder=True` in the data set, or "
            '`InputOptions(remainder="drop")` or `InputOptions(remainder="pad")`.'
        )
