"""The hand-written loop with one `lax.scan` over a chunk of stacked batches.

State is donated, a thread stacks the next chunk and puts it on the device, and the sum
of the losses is one more part of the carry.
"""

from typing import Any

import jax

from benchmarks.contestants.functional import State
from benchmarks.contestants.prefetch import Prefetch
from benchmarks.contestants.reference import Reference
from benchmarks.contestants.rows import read_chunks
from benchmarks.protocol import Options
from benchmarks.tasks import Task

# Longer chunks are no faster on the CPU: by then Python's time is hidden.
_MOST_STEPS = 20
_DEPTH = 2


class ReferenceScan(Reference):
    """One program per chunk."""

    def setup(self, task: Task, options: Options) -> None:
        """Builds model, optimizer and data."""
        super().setup(task, options)
        self._chunk_steps = largest_divisor(options.steps_per_loop, _MOST_STEPS)
        self.facts["steps_per_chunk"] = self._chunk_steps
        sharding = self.batch_sharding(leading=1)
        self._chunks = Prefetch(
            read_chunks(task, options.data, self._chunk_steps),
            lambda chunk: jax.device_put(chunk, sharding),
            _DEPTH,
        )
        self.program = jax.jit(self.run_chunk, donate_argnums=0)

    def next_chunk(self) -> Any:
        """Returns the next chunk, on the device."""
        return next(self._chunks)

    def run(self, num_steps: int) -> float:
        """Runs steps; returns the mean loss of the last loop."""
        for _ in range(num_steps // self.options.steps_per_loop):
            total = self.zero
            for _ in range(self.options.steps_per_loop // self._chunk_steps):
                if self.must_wait:
                    jax.block_until_ready(total)
                self.state, total = self.program(
                    self.state, total, next(self._chunks), self.resident
                )
            self.report(total)
        return self.finish()

    def run_chunk(
        self, state: State, total: jax.Array, chunk: Any, resident: Any
    ) -> tuple[State, jax.Array]:
        """Runs the steps of one chunk: the function that is compiled."""

        def body(carry: tuple[State, jax.Array], batch: Any) -> tuple[Any, None]:
            state, total = carry
            state, loss = self.functional.step(state, self.gather(resident, batch))
            return (state, total + loss), None

        (state, total), _ = jax.lax.scan(body, (state, total), chunk)
        return state, total


def largest_divisor(number: int, most: int) -> int:
    """Returns the largest divisor of a number that is at most `most`."""
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)
