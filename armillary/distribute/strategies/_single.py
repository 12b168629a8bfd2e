"""Strategies with one replica: the default one, and one on a chosen device.

Synchronous training on the devices of one process.

Synchronous training with the variables in one place.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, Sharding, SingleDeviceSharding

from armillary._checks import check_instance
from armillary._jaxpr import is_in_trace
from armillary.data._layout import BatchLayout
from armillary.distribute._global_arrays import everywhere
from armillary.distribute._keras_fit import follow_keras
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._function import Functions
from armillary.distribute.program._notes import add_trace_note
from armillary.distribute.replica._alone import run_in_place, run_traced
from armillary.distribute.replica._collectives import ReplicaContext, check_wire_dtype
from armillary.distribute.replica._context import (
    lifted_state,
    require_scope,
    set_default,
)
from armillary.distribute.replica._policy import check_annotations
from armillary.distribute.replica._reductions import CrossDeviceOps
from armillary.distribute.replica._run import run_in_replicas
from armillary.distribute.replica._values import AXIS_NAME
from armillary.distribute.strategies._layouts import (
    Device,
    ReplicaLayout,
    SingleLayout,
    as_device,
    as_devices,
    check_alone,
)
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
            try:
                if state is not None and is_in_trace():
                    return run_traced(self, fn, args, kwargs, state)
                context = ReplicaContext(self, None, active=1)
                return run_in_place(self, context, fn, args, kwargs)
            except Exception as error:
                if state is None:
                    add_trace_note(error)
                raise


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
