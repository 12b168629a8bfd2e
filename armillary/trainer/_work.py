"""The work of a training step: its examples, its FLOPs and its memory.

All of it is known once the step is traced and compiled. Facts that cannot be counted
are left out, because a run must not end for a number in its log.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from armillary._logging import logger
from armillary.data.feed._chunks import Chunk
from armillary.distribute._global_arrays import is_on_host
from armillary.distribute._strategy import Strategy
from armillary.xla._flops import count_model_flops


class Work(NamedTuple):
    """The work of one step, or the mean of several steps; NaN if it is unknown.

    Attributes:
        examples: The rows of the global batch.
        flops: Model FLOPs on each device.
    """

    examples: float = math.nan
    flops: float = math.nan


class Footprint(NamedTuple):
    """The memory that a program needs on each device.

    Attributes:
        device_kind: The kind of the devices, as JAX names it.
        state_bytes: Bytes of the state.
        temporary_bytes: Bytes of intermediate results, if the compiler reports them.
    """

    device_kind: str
    state_bytes: int
    temporary_bytes: int | None


class WorkCount:
    """Adds up the work of the steps of a loop."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._num_steps = 0
        self._examples = 0.0
        self._flops = 0.0

    def add(self, work: Work, num_steps: int) -> None:
        self._num_steps += num_steps
        self._examples += work.examples * num_steps
        self._flops += work.flops * num_steps

    def take(self) -> Work:
        """Returns the mean of the steps so far, and begins again."""
        if not self._num_steps:
            return Work()
        examples = self._examples / self._num_steps
        flops = self._flops / self._num_steps
        self._begin()
        return Work(examples, flops)


def measure_work(
    program: Any,
    chunk: Chunk,
    batches_per_step: Sequence[int],
    strategy: Strategy,
) -> Work:
    """Returns the work of one step, a traced program, of a chunk."""
    try:
        examples = _count_examples(chunk, batches_per_step, strategy)
        flops = _count_flops(program, chunk, strategy)
    except Exception as error:
        logger.debug("The work of a step could not be counted: %r", error)
        return Work()
    # Without products, there is nothing that a peak could be compared with.
    return Work(examples or math.nan, flops or math.nan)


def _count_examples(
    chunk: Chunk, batches_per_step: Sequence[int], strategy: Strategy
) -> float:
    """Returns the number of examples in a step, over all replicas."""
    total = 0
    datasets = zip(chunk.types, chunk.active, batches_per_step, strict=True)
    for types, active, num_batches in datasets:
        shape = jax.tree.leaves(types)[0].shape
        # If batches are stacked, the first axis is the replicas, and some of them may
        # have no data.
        is_stacked = strategy.layout.stacked
        num_rows = len(active) * shape[1] if is_stacked else shape[0]
        total += num_batches * num_rows
    return total


def _count_flops(program: Any, chunk: Chunk, strategy: Strategy) -> float:
    """Returns model FLOPs on each device."""
    flops = count_model_flops(program)
    num_devices = 1 if strategy.mesh is None else strategy.mesh.size
    if not strategy.layout.stacked:
        return flops / num_devices  # The trace is the step of all devices together.
    # The trace is the step of one replica. A small batch may run on fewer replicas than
    # devices, and then the other devices do nothing new.
    num_active = max(map(len, chunk.active), default=num_devices)
    return flops * num_active / num_devices


def measure_footprint(
    compiled: Any,
    donated: Sequence[jax.Array],
    inputs: Any,
    state: Sequence[jax.Array],
) -> Footprint | None:
    """Returns the footprint of a program that was called with `donated` and `inputs`.

    JAX finds the compiled program by the arguments of the call, so nothing is compiled
    again. The arrays may be deleted.
    """
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    try:
        device = min(state[0].sharding.device_set, key=lambda device: device.id)
        state_bytes = sum(map(_count_bytes, state))
        program = compiled.lower(donated, inputs).compile()
        analysis = program.memory_analysis()
    except Exception as error:
        logger.debug("The memory of a program could not be measured: %r", error)
        return None
    temporary_bytes = getattr(analysis, "temp_size_in_bytes", None)
    return Footprint(device.device_kind, state_bytes, temporary_bytes)


def _count_bytes(array: jax.Array) -> int:
    """Returns the bytes of an array on each device."""
    if is_on_host(array):
        return 0
    shape = array.sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize
