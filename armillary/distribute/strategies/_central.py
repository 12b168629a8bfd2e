"""Synchronous training with the variables in one place."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Sharding, SingleDeviceSharding

from armillary.distribute._global_arrays import everywhere
from armillary.distribute.replica._context import lifted_state
from armillary.distribute.strategies._devices import Device, as_device, as_devices
from armillary.distribute.strategies._mirrored import MirroredStrategy
from armillary.state._lift import State
from armillary.typing import PyTree


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
        reduce_dtype: As for `MirroredStrategy`.

    Raises:
        ValueError: If a device does not exist, or the devices cannot form replicas.
    """

    has_copies = False

    def __init__(
        self,
        compute_devices: Sequence[Any] | None = None,
        parameter_device: Any = None,
        *,
        reduce_dtype: Any = None,
    ) -> None:
        found = None
        if compute_devices is not None:
            found = as_devices("compute_devices", compute_devices)
        super().__init__(found, reduce_dtype=reduce_dtype)
        self._parameter_device = (
            _host()
            if parameter_device is None
            else as_device("parameter_device", parameter_device)
        )
        self._home = SingleDeviceSharding(self._parameter_device)

    @property
    def parameter_device(self) -> Device:
        """Where variables live."""
        return self._parameter_device

    def state_shardings(self, state: State) -> Sequence[Sharding | None]:
        """Every array on the parameter device."""
        return [self._home] * len(state.paths)

    def program_shardings(self, state: State) -> Sequence[Sharding | None]:
        """A copy of every array on each device."""
        return super().state_shardings(state)

    def admit(self, arrays: list[Any]) -> list[Any]:
        """Returns a program's arguments, with values of variables on each device."""
        away = everywhere(self._replica_mesh)

        def move(array: Any) -> Any:
            is_home = isinstance(array, jax.Array) and array.sharding == self._home
            return jax.device_put(array, away) if is_home else array

        return list(map(move, arrays))

    def _outside(self, value: PyTree) -> PyTree:
        """Returns a result beside the variables, so that code can use both."""
        self.dispatch.finish(value)
        if lifted_state() is not None:
            return value
        return jax.tree.map(self._bring_home, value)

    def _bring_home(self, leaf: Any) -> Any:
        is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        return jax.device_put(leaf, self._home) if is_array else leaf

    def __repr__(self) -> str:
        platform = self._replica_mesh.devices.flat[0].platform
        replicas = f"{self.num_replicas_in_sync} x {platform}"
        home = f"{self._parameter_device.platform}:{self._parameter_device.id}"
        return f"CentralStorageStrategy({replicas}, state on {home})"


def _host() -> Device:
    """Returns the CPU.

    Raises:
        ValueError: If JAX was told to leave it out.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            "`parameter_device` is None, which means the first CPU, but JAX was told "
            f"to use no CPU ({error}). Add it to what it uses, as in "
            "`JAX_PLATFORMS=cuda,cpu`, or pass `parameter_device=...`."
        ) from error
