"""Strategies on the devices of one process, with one replica or one per device."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, Sharding, SingleDeviceSharding

from armillary.data._layout import BatchLayout
from armillary.distribute._global_arrays import everywhere
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._function import Functions
from armillary.distribute.replica._collectives import ReplicaContext
from armillary.distribute.replica._context import require_scope, set_default
from armillary.distribute.replica._policy import check_annotations
from armillary.distribute.replica._run import run_alone, run_in_replicas
from armillary.distribute.replica._values import AXIS_NAME
from armillary.distribute.strategies._layouts import (
    Device,
    ReplicaLayout,
    SingleLayout,
    as_device,
    as_devices,
)
from armillary.state._keras import follow_keras
from armillary.state._lift import State
from armillary.typing import PyTree


class SingleStrategy(Strategy):
    """One replica, on a device or, for `None`, wherever JAX puts it."""

    def __init__(self, device: Device | None = None) -> None:
        super().__init__(mesh=None, num_replicas=1)
        self._device = device
        self._sharding = None if device is None else SingleDeviceSharding(device)

    @property
    def layout(self) -> BatchLayout:
        """Batches on the device."""
        return SingleLayout(self._sharding)

    def state_shardings(self, state: State) -> Sequence[Sharding | None]:
        """Every array on the device."""
        return [self._sharding] * len(state.paths)

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        if state is not None:
            check_annotations(state)
        place = nullcontext if self._device is None else jax.default_device
        with place(self._device):
            return run_alone(self, fn, args, kwargs, state)


class DefaultStrategy(SingleStrategy):
    """The strategy in effect where no other is: everything stays as it is.

    There is one instance. Under it, `run` calls the function as the only replica, and
    state and batches stay on JAX's default device.
    """

    _instance: "DefaultStrategy | None" = None

    def __new__(cls) -> Self:
        """Returns the one instance."""
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance  # pyright: ignore[reportReturnType]

    def __init__(self) -> None:
        super().__init__()

    def scope(self) -> AbstractContextManager[Strategy]:
        """Changes nothing: this strategy is in effect where no other is.

        Raises:
            ReplicaContextError: Inside `run`, or inside another strategy's scope.
        """
        require_scope(self)
        follow_keras()
        return nullcontext(self)


class OneDeviceStrategy(SingleStrategy):
    """Runs every step on one device (`tf.distribute.OneDeviceStrategy`).

    Args:
        device: A `jax.Device`, or a name such as `"cpu:0"` or `"gpu:1"`.

    Raises:
        ValueError: If there is no such device.
    """

    def __init__(self, device: Any) -> None:
        super().__init__(as_device("device", device))

    def __repr__(self) -> str:
        return f"OneDeviceStrategy({self._device})"


_default = DefaultStrategy()
set_default(_default, ReplicaContext(_default, None, active=1))


class MirroredStrategy(Strategy):
    """One replica per device, with equal variables on all of them.

    As `tf.distribute.MirroredStrategy`: each replica computes gradients on its share of
    the batch, the step reduces them (`armillary.all_reduce`), and every replica makes
    the same update.

    Args:
        devices: One `jax.Device` or name (`"gpu:0"`) per replica. By default all
            devices of this process.

    Raises:
        ValueError: If the devices cannot form replicas.
    """

    def __init__(self, devices: Sequence[Any] | None = None) -> None:
        found = as_devices("devices", devices)
        axis_types = (AxisType.Auto,)
        mesh = Mesh(np.asarray(found), (AXIS_NAME,), axis_types=axis_types)
        super().__init__(mesh, num_replicas=len(found))
        self._functions = Functions()

    def _describe(self, num_devices: int) -> None:
        axis_types = (AxisType.Auto,)
        self._mesh = AbstractMesh((num_devices,), (AXIS_NAME,), axis_types=axis_types)
        self._num_replicas = num_devices

    @property
    def layout(self) -> BatchLayout:
        """One row of a batch on each device, given by the process that has it."""
        return ReplicaLayout(self._mesh, self.peers)

    def state_shardings(self, state: State) -> Sequence[Sharding | None]:
        """A copy of every array on each device."""
        return [everywhere(self._mesh)] * len(state.paths)

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        if state is not None:
            return run_in_replicas(self, self._mesh, fn, args, kwargs, state)
        return self._functions.get(fn, self)(*args, **kwargs)

    def _show(self, where: str = "") -> str:
        replicas = f"{self.num_replicas_in_sync} x {self.platform}"
        return f"{type(self).__name__}({replicas}{where})"

    def __repr__(self) -> str:
        return self._show()


class CentralStorageStrategy(MirroredStrategy):
    """One replica per device, with the variables in one place.

    As `tf.distribute.experimental.CentralStorageStrategy`: variables live in the memory
    of `parameter_device`, by default that of the host. A compiled program begins with
    copying those that it reads to the devices, and ends with copying those that it
    changed back. So between programs the devices hold no state; while one runs, each
    holds a copy, as under `MirroredStrategy`, and all make the same aggregated update.
    A program is a call of an `armillary.function` or of `run`, or a chunk of steps of a
    trainer: `StandardTrainerOptions(steps_per_chunk=1)` moves state at every step.

    Args:
        compute_devices: One `jax.Device` or name (`"gpu:0"`) per replica. By default
            all devices of this process.
        parameter_device: Where variables live, a device or a name. By default the first
            CPU, whose memory is that of the host. A name reaches platforms other than
            JAX's default one.

    Raises:
        ValueError: If a device does not exist, or the devices cannot form replicas.
    """

    def __init__(
        self,
        compute_devices: Sequence[Any] | None = None,
        parameter_device: Any = None,
    ) -> None:
        super().__init__(as_devices("compute_devices", compute_devices))
        home = "cpu:0" if parameter_device is None else parameter_device
        self._parameter_device = as_device("parameter_device", home)
        self.home = SingleDeviceSharding(self._parameter_device)

    @property
    def parameter_device(self) -> Device:
        """Where variables live."""
        return self._parameter_device

    def __repr__(self) -> str:
        home = f"{self._parameter_device.platform}:{self._parameter_device.id}"
        return self._show(f", state on {home}")
