"""Synchronous training on the devices of one process."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, Sharding

from armillary.data._layout import BatchLayout
from armillary.distribute._global_arrays import everywhere
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._function import Functions
from armillary.distribute.replica._policy import AXIS_NAME
from armillary.distribute.replica._run import run_in_replicas
from armillary.distribute.strategies._devices import as_devices
from armillary.distribute.strategies._layouts import ReplicaLayout
from armillary.state._lift import State
from armillary.typing import PyTree


class MirroredStrategy(Strategy):
    """One replica per device, with equal variables on all of them.

    As `tf.distribute.MirroredStrategy`: each replica computes gradients on its share of
    the batch, the gradients are summed, and every replica makes the same update. XLA
    chooses how to sum.

    Args:
        devices: One `jax.Device` or name (`"gpu:0"`) per replica. By default all
            devices of this process.
        cross_device_ops: Kept for programs that come from TensorFlow; must be `None`.

    Raises:
        ValueError: If the devices cannot form replicas, or `cross_device_ops` is given.
    """

    def __init__(
        self, devices: Sequence[Any] | None = None, cross_device_ops: None = None
    ) -> None:
        if cross_device_ops is not None:
            raise ValueError(
                f"`cross_device_ops` is {cross_device_ops!r}, but XLA chooses the "
                "collectives for the devices it finds. Leave it out, or pass "
                "`cross_device_ops=None`."
            )
        found = as_devices("devices", devices)
        axis_types = (AxisType.Auto,)
        mesh = Mesh(np.asarray(found), (AXIS_NAME,), axis_types=axis_types)
        super().__init__(mesh, num_replicas=len(found))
        self._replica_mesh = mesh
        self._functions = Functions()

    @property
    def layout(self) -> BatchLayout:
        """One row of a batch on each device."""
        return ReplicaLayout(self._replica_mesh)

    def state_shardings(self, state: State) -> Sequence[Sharding | None]:
        """A copy of every array on each device."""
        return [everywhere(self._replica_mesh)] * len(state.paths)

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        if state is not None:
            return run_in_replicas(self, self._replica_mesh, fn, args, kwargs, state)
        return self._functions.get(fn, self)(*args, **kwargs)

    def __repr__(self) -> str:
        platform = self._replica_mesh.devices.flat[0].platform
        return f"MirroredStrategy({self.num_replicas_in_sync} x {platform})"
