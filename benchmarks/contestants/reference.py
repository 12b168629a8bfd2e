"""The two loops written by hand: one program per step, and one per chunk of steps."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from benchmarks.contestants.environment import prepare
from benchmarks.contestants.functional import State, make_functional
from benchmarks.contestants.prefetch import Prefetch
from benchmarks.contestants.rows import read_batches, read_chunks
from benchmarks.protocol import Options
from benchmarks.tasks import Batch, Task

# Longer chunks are no faster on the CPU: by then Python's time is hidden.
_MOST_STEPS = 20


class Reference:
    """Base of the references; the subclass runs the steps.

    On several devices the batch is sharded and `jit` does the rest.
    """

    def setup(self, task: Task, options: Options) -> None:
        """Builds model, optimizer and data."""
        prepare(options)
        self.options = options
        self.facts: dict[str, Any] = {}
        self.replicated, self.sharded = self._make_shardings(options.devices)
        self.task = task
        self.functional = make_functional(task, options.dtype)
        self.state = jax.device_put(self.functional.state, self.replicated)
        self.zero = jax.device_put(jnp.zeros(()), self.replicated)
        self.resident: Any = None
        if options.data == "resident":
            self.resident = jax.device_put(task.make_arrays(), self.replicated)
        # Programs with collectives that are in flight together can wait for each
        # other's threads on the CPU, so there one runs at a time.
        is_cpu = jax.default_backend() == "cpu"
        self.must_wait = is_cpu and options.devices > 1
        self._pending: jax.Array | None = None

    def batch_sharding(self, leading: int) -> Sharding:
        """Returns where a batch goes that has `leading` axes before the examples'."""
        if not isinstance(self.sharded, NamedSharding):
            return self.sharded
        axes = (*(None for _ in range(leading)), "data")
        return NamedSharding(self.sharded.mesh, PartitionSpec(*axes))

    def gather(self, resident: Batch | None, batch: Any) -> Batch:
        """Returns the rows of a batch of row numbers, or the batch as it is."""
        if resident is None:
            return batch
        return {name: array[batch] for name, array in resident.items()}

    def report(self, total: jax.Array) -> None:
        """Fetches the loss of the last loop while the one just started runs."""
        total.copy_to_host_async()
        last, self._pending = self._pending, total
        if last is not None:
            float(last)

    def finish(self) -> float:
        """Waits for everything and returns the mean loss of the last loop."""
        jax.block_until_ready(self.state)
        total, self._pending = self._pending, None
        assert total is not None
        return float(total) / self.options.steps_per_loop

    def _make_shardings(self, devices: int) -> tuple[Sharding, Sharding]:
        if devices == 1:
            single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            return single, single
        mesh = jax.make_mesh(
            (devices,),
            ("data",),
            axis_types=(AxisType.Auto,),
            devices=jax.devices()[:devices],
        )
        replicated = NamedSharding(mesh, PartitionSpec())
        return replicated, NamedSharding(mesh, PartitionSpec("data"))


class ReferenceStep(Reference):
    """One call of `jit` per step.

    Calls are asynchronous, state is donated, a thread keeps batches on the device, and
    the sum of the losses stays there until a loop has ended.
    """

    def setup(self, task: Task, options: Options) -> None:
        """Builds model, optimizer and data."""
        super().setup(task, options)
        sharding = self.batch_sharding(leading=0)
        self._batches = Prefetch(
            read_batches(task, options.data),
            lambda batch: jax.device_put(batch, sharding),
            depth=8,
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


class ReferenceScan(Reference):
    """One `lax.scan` over a chunk of stacked batches.

    State is donated, a thread stacks the next chunk and puts it on the device, and the
    sum of the losses is one more part of the carry.
    """

    def setup(self, task: Task, options: Options) -> None:
        """Builds model, optimizer and data."""
        super().setup(task, options)
        self._chunk_steps = largest_divisor(options.steps_per_loop, _MOST_STEPS)
        self.facts["steps_per_chunk"] = self._chunk_steps
        sharding = self.batch_sharding(leading=1)
        self._chunks = Prefetch(
            read_chunks(task, options.data, self._chunk_steps),
            lambda chunk: jax.device_put(chunk, sharding),
            depth=2,
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
