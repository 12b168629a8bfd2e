"""The two loops written by hand: one program per step, and one per chunk of steps."""

import abc
from collections.abc import Iterator
from typing import Any, ClassVar

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
_MAX_STEPS = 20


class Reference(abc.ABC):
    """Base of the references: calls a program, which runs one step or a chunk of them.

    Calls are asynchronous, state is donated, a thread reads the next inputs and puts
    them on the device, and the sum of the losses stays there until a loop has ended. On
    several devices the batch is sharded and `jit` does the rest.

    Attributes:
        num_leading: Axes of an input before the axis of the examples.
        depth: Inputs that are read ahead.
        steps_per_call: Steps of the program.
    """

    num_leading: ClassVar[int]
    depth: ClassVar[int]
    steps_per_call = 1

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
        # Its thread must not hold this object, with which it ends.
        sharding = self.sharded
        self.inputs = Prefetch(
            self.read(), lambda read: jax.device_put(read, sharding), self.depth
        )
        self.program = jax.jit(self.call, donate_argnums=0)

    @abc.abstractmethod
    def read(self) -> Iterator[Any]:
        """Yields inputs of the program."""

    @abc.abstractmethod
    def call(
        self, state: State, total: jax.Array, read: Any, resident: Any
    ) -> tuple[State, jax.Array]:
        """Runs the steps of one input: the function that is compiled."""

    def run(self, num_steps: int) -> float:
        """Runs steps; returns the mean loss of the last loop."""
        for _ in range(num_steps // self.options.steps_per_loop):
            total = self.zero
            for _ in range(self.options.steps_per_loop // self.steps_per_call):
                if self.must_wait:
                    jax.block_until_ready(total)
                self.state, total = self.program(
                    self.state, total, next(self.inputs), self.resident
                )
            self.report(total)
        return self.finish()

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
        axes = (*(None for _ in range(self.num_leading)), "data")
        replicated = NamedSharding(mesh, PartitionSpec())
        return replicated, NamedSharding(mesh, PartitionSpec(*axes))


class ReferenceStep(Reference):
    """One call of `jit` per step."""

    num_leading, depth = 0, 8

    def read(self) -> Iterator[Any]:
        """Yields batches."""
        return read_batches(self.task, self.options.data)

    def call(
        self, state: State, total: jax.Array, read: Any, resident: Any
    ) -> tuple[State, jax.Array]:
        """Runs one step."""
        state, loss = self.functional.step(state, self.gather(resident, read))
        return state, total + loss


class ReferenceScan(Reference):
    """One `lax.scan` over a chunk of stacked batches."""

    num_leading, depth = 1, 2

    def read(self) -> Iterator[Any]:
        """Yields chunks, of as many steps as divide a loop."""
        steps = self.options.steps_per_loop
        most = min(steps, _MAX_STEPS)
        self.steps_per_call = next(n for n in range(most, 0, -1) if steps % n == 0)
        self.facts["steps_per_chunk"] = self.steps_per_call
        return read_chunks(self.task, self.options.data, self.steps_per_call)

    def call(
        self, state: State, total: jax.Array, read: Any, resident: Any
    ) -> tuple[State, jax.Array]:
        """Runs the steps of a chunk; the sum of losses is part of the carry."""

        def body(carry: tuple[State, jax.Array], batch: Any) -> tuple[Any, None]:
            state, total = carry
            state, loss = self.functional.step(state, self.gather(resident, batch))
            return (state, total + loss), None

        (state, total), _ = jax.lax.scan(body, (state, total), read)
        return state, total
