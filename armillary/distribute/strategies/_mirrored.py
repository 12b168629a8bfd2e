"""Synchronous training on the devices of one process."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, Sharding

from armillary._checks import check_instance
from armillary.data._layout import BatchLayout
from armillary.distribute._global_arrays import everywhere
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._function import Functions
from armillary.distribute.replica._collectives import check_wire_dtype
from armillary.distribute.replica._cross_device_ops import CrossDeviceOps
from armillary.distribute.replica._run import run_in_replicas
from armillary.distribute.replica._values import AXIS_NAME
from armillary.distribute.strategies._devices import as_devices, check_alone
from armillary.distribute.strategies._layouts import ReplicaLayout
from armillary.state._lift import State
from armillary.typing import PyTree

# What of a strategy depends on its devices, for `described`.
_OF_DEVICES = ("_mesh", "_replica_mesh", "_num_replicas", "_described_platform")


class MirroredStrategy(Strategy):
    """One replica per device, with equal variables on all of them.

    As `tf.distribute.MirroredStrategy`: each replica computes gradients on its share of
    the batch, the step reduces them (`armillary.all_reduce`), and every replica makes
    the same update.

    Args:
        devices: One `jax.Device` or name (`"gpu:0"`) per replica. By default all
            devices of this process.
        cross_device_ops: How `all_reduce` sums over replicas: one of
            `armillary.distribute`, or a `CrossDeviceOps` of your own. `None` leaves it
            to XLA, which is nearly always best.
        reduce_dtype: What floats travel in between replicas, such as `jnp.bfloat16`,
            where a step does not say. `None` for the dtype of each value.

    Raises:
        TypeError: If `cross_device_ops` is something else.
        ValueError: If the devices cannot form replicas, or do not fit
            `cross_device_ops`, or `reduce_dtype` is no dtype of floats.
    """

    def __init__(
        self,
        devices: Sequence[Any] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        reduce_dtype: Any = None,
    ) -> None:
        found = as_devices("devices", devices)
        if cross_device_ops is not None:
            fix = "Use `armillary.distribute.NcclAllReduce()`, or leave it out."
            check_instance("cross_device_ops", cross_device_ops, CrossDeviceOps, fix)
            cross_device_ops.check(len(found))
        axis_types = (AxisType.Auto,)
        mesh = Mesh(np.asarray(found), (AXIS_NAME,), axis_types=axis_types)
        super().__init__(mesh, num_replicas=len(found))
        self._replica_mesh = mesh
        self.cross_device_ops = cross_device_ops
        self.reduce_dtype = check_wire_dtype("reduce_dtype", reduce_dtype)
        self._functions = Functions()

    @contextlib.contextmanager
    def described(self, num_devices: int, platform: str) -> Iterator[AbstractMesh]:
        """Lets this strategy trace programs for devices that are not there.

        Inside, it has that many replicas: in every object that holds it, since the
        user's step asks for their number. See `Strategy.described` for what it takes.

        Raises:
            ValueError: If it spans several processes, which would have to agree.
        """
        check_alone(self)
        axis_types = (AxisType.Auto,)
        mesh = AbstractMesh((num_devices,), (AXIS_NAME,), axis_types=axis_types)
        before = {name: getattr(self, name) for name in _OF_DEVICES}
        now = (mesh, mesh, num_devices, platform)
        vars(self).update(zip(_OF_DEVICES, now, strict=True))
        try:
            yield mesh
        finally:
            vars(self).update(before)

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
