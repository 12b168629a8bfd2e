"""The hand-written loop with one call of `jit` per step.

Calls are asynchronous, state is donated, a thread keeps batches on the device, and the
sum of the losses stays there until a loop has ended.
"""

from typing import Any

import jax

from benchmarks.contestants.functional import State
from benchmarks.contestants.prefetch import Prefetch
from benchmarks.contestants.reference import Reference
from benchmarks.contestants.rows import read_batches
from benchmarks.protocol import Options
from benchmarks.tasks import Task

_DEPTH = 8


class ReferenceStep(Reference):
    """One program per step."""

    def setup(self, task: Task, options: Options) -> None:
        """Builds model, optimizer and data."""
        super().setup(task, options)
        sharding = self.batch_sharding(leading=0)
        self._batches = Prefetch(
            read_batches(task, options.data),
            lambda batch: jax.device_put(batch, sharding),
            _DEPTH,
        )
        self._step = jax.jit(self._run_step, donate_argnums=0)

    def run(self, num_steps: int) -> float:
        """Runs steps; returns the mean loss of the last loop."""
        for _ in range(num_steps // self.options.steps_per_loop):
            total = self.zero
            for _ in range(self.options.steps_per_loop):
                if self.must_wait:
                    jax.block_until_ready(total)
                self.state, total = self._step(
                    self.state, total, next(self._batches), self.resident
                )
            self.report(total)
        return self.finish()

    def _run_step(
        self, state: State, total: jax.Array, batch: Any, resident: Any
    ) -> tuple[State, jax.Array]:
        state, loss = self.functional.step(state, self.gather(resident, batch))
        return state, total + loss
