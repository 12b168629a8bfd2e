"""Chunks: the batches of many steps, stacked for one device call.

A step takes `batches_per_step[i]` batches of reader i. A chunk holds steps whose
batches have one structure and one shape, so that one program can run them.
"""

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from armillary._checks import check_positive_int
from armillary.data._layout import Active
from armillary.data.feed._batch_reader import BatchReader
from armillary.data.feed._gather import empty_aligned
from armillary.data.feed._position import Position
from armillary.data.feed._split import HostBatch
from armillary.data.sources._batch import describe_shapes, get_signature
from armillary.errors import BatchSizeError
from armillary.typing import PyTree

Step = list[list[HostBatch]]
"""For each reader, the batches that one step takes of it."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """The batches of `num_steps` steps, on the device.

    Args:
        arrays: For each reader, a pytree whose leaves have shape
            `(capacity * batches_per_step, ...)`, then the layout's shape. Batch b of
            step s is at index `s * batches_per_step + b`, for `Gather.on_device`.
            Steps from `num_steps` on are no data and must not run.
        resident: For each reader, the arrays of its data that stay on the device.
        types: For each reader, shapes and dtypes of one batch as a step receives it.
        num_steps: Steps that have data, at least 1.
        capacity: Steps for which there is room; the same for all chunks of a signature,
            so that one program serves them.
        signature: Equal for chunks whose steps have batches of one structure, shape
            and dtype, on as many replicas.
        num_active: For each reader, which replicas have data.
        positions: For each step, the position of each reader after it.
        ends: For each step, whether it is the last one of its batches; False only for
            the first pieces of a batch that runs as several smaller steps.
    """

    arrays: list[PyTree]
    resident: list[PyTree]
    types: list[PyTree]
    num_steps: int
    capacity: int
    signature: Hashable
    num_active: tuple[Active, ...]
    positions: list[tuple[Position, ...]]
    ends: list[bool]

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
        max_chunk_bytes: Most host memory of one chunk. A chunk has at least one step,
            however large.
        gives_errors_at_once: Whether the steps that were read before an error are
            lost, instead of being given out first.

    Raises:
        ValueError: If a number is not positive.
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
        """Yields chunks until a step lacks data.

        Steps that were read before an error are given out first, if it is not to come
        at once, so that what runs does not depend on the size of chunks.
        """
        step = self._read_step(readers)
        while step is not None:
            stack, step, error = self._fill_stack(readers, step)
            chunk = self._place(readers, stack)
            del stack  # The next chunk must not find this one's host memory still held.
            yield chunk
            del chunk
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

    def _fill_stack(
        self, readers: Sequence[BatchReader], step: Step
    ) -> tuple["_Stack", Step | None, Exception | None]:
        """Stacks `step` and those that fit behind it."""
        room = self._get_room(readers, step)
        stack = _Stack(step, room, self._batches_per_step, readers)
        while stack.add(step) < stack.room:
            try:
                following = self._read_step(readers)
            except Exception as error:
                if self._gives_errors_at_once:
                    raise
                return stack, None, error
            if following is None or _get_step_signature(following) != stack.signature:
                return stack, following, None
            step = following
        return stack, None, None

    def _get_room(self, readers: Sequence[BatchReader], step: Step) -> int:
        """Returns how many steps the chunk that begins with `step` may have."""
        capacity = self._capacities.get(_get_step_signature(step))
        if capacity is not None:
            return capacity
        sent = [
            reader.gather.sent_types(batches[0])
            for reader, batches in zip(readers, step, strict=True)
        ]
        return self.count_steps(sent)

    def count_steps(self, sent_types: Sequence[PyTree]) -> int:
        """Returns how many steps fit into a chunk, by what travels for each batch."""
        num_bytes = sum(
            count * leaf.size * leaf.dtype.itemsize
            for count, types in zip(self._batches_per_step, sent_types, strict=True)
            for leaf in jax.tree.leaves(types)
        )
        num_steps = self._max_chunk_bytes // max(1, num_bytes)
        return max(1, min(self._steps_per_chunk, num_steps))

    def _place(self, readers: Sequence[BatchReader], stack: "_Stack") -> Chunk:
        # No later chunk has more steps of this shape if the data ended inside it.
        capacity = self._capacities.setdefault(stack.signature, stack.num_steps)
        gathers = [reader.gather for reader in readers]
        placed = [
            gather.send(arrays, 1, num_replicas)
            for gather, arrays, num_replicas in zip(
                gathers, stack.finish(capacity), stack.num_replicas, strict=True
            )
        ]
        return Chunk(
            arrays=placed,
            resident=[gather.resident for gather in gathers],
            types=stack.types,
            num_steps=stack.num_steps,
            capacity=capacity,
            signature=stack.signature,
            num_active=stack.num_active,
            positions=stack.positions,
            ends=stack.ends,
        )


class _Stack:
    """Host memory for one chunk. Each has its own: devices may share it for long."""

    def __init__(
        self,
        step: Step,
        room: int,
        batches_per_step: Sequence[int],
        readers: Sequence[BatchReader],
    ) -> None:
        self.room = room
        self.num_steps = 0
        self.signature = _get_step_signature(step)
        self.num_active = tuple(batches[0].num_active for batches in step)
        self.num_replicas = [batches[0].num_replicas for batches in step]
        self.types = [
            reader.gather.types(batches[0])
            for reader, batches in zip(readers, step, strict=True)
        ]
        self.positions: list[tuple[Position, ...]] = []
        self.ends: list[bool] = []
        self._batches_per_step = batches_per_step
        self._buffers = [
            jax.tree.map(
                lambda leaf, size=room * count: empty_aligned(
                    (size, *leaf.shape), leaf.dtype
                ),
                batches[0].arrays,
            )
            for batches, count in zip(step, batches_per_step, strict=True)
        ]

    def add(self, step: Step) -> int:
        """Copies the batches of `step` in; returns the number of steps."""
        for buffers, batches in zip(self._buffers, step, strict=True):
            leaves = jax.tree.leaves(buffers)
            start = self.num_steps * len(batches)
            for index, batch in enumerate(batches, start):
                for buffer, leaf in zip(
                    leaves, jax.tree.leaves(batch.arrays), strict=True
                ):
                    buffer[index] = leaf
        self.positions.append(tuple(batches[-1].position for batches in step))
        self.ends.append(all(batches[-1].is_last for batches in step))
        self.num_steps += 1
        return self.num_steps

    def finish(self, capacity: int) -> list[PyTree]:
        """Returns the buffers at `capacity` steps, zero where there is no data."""

        def trim(buffer: np.ndarray, count: int) -> np.ndarray:
            buffer[self.num_steps * count :] = 0
            return buffer[: capacity * count]

        return [
            jax.tree.map(lambda buffer, count=count: trim(buffer, count), buffers)
            for buffers, count in zip(
                self._buffers, self._batches_per_step, strict=True
            )
        ]


def _get_step_signature(step: Step) -> Hashable:
    return tuple(
        (
            get_signature(batches[0].arrays),
            batches[0].num_active,
            batches[0].num_replicas,
        )
        for batches in step
    )


def _check_equal_shapes(
    reader: BatchReader, batches: list[HostBatch], index: int
) -> None:
    first = batches[0]
    for batch in batches[1:]:
        if _get_step_signature([[batch]]) != _get_step_signature([[first]]):
            raise BatchSizeError(
                f"One step takes {len(batches)} batches of dataset {index}, and they "
                "must have one shape, but they differ:\n"
                f"  {describe_shapes(reader.gather.types(first))} on "
                f"{first.num_active} replicas\n"
                f"  {describe_shapes(reader.gather.types(batch))} on "
                f"{batch.num_active} replicas\n"
                "Use `drop_remainder=True` in the data set, or "
                '`InputOptions(remainder="drop")` or `InputOptions(remainder="pad")`.'
            )
