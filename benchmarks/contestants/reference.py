"""What the two hand-written references share: devices, placement and data."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from benchmarks.contestants.environment import prepare
from benchmarks.contestants.functional import make_functional
from benchmarks.protocol import Options
from benchmarks.tasks import Batch, Task


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
