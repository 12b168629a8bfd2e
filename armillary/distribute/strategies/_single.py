"""Strategies with one replica: the default one, and one on a chosen device."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from armillary._jaxpr import is_in_trace
from armillary.data._layout import BatchLayout
from armillary.distribute._keras_fit import follow_keras
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._outside_traces import add_trace_note
from armillary.distribute.replica._alone import run_in_place, run_traced
from armillary.distribute.replica._collectives import ReplicaContext
from armillary.distribute.replica._context import require_scope, set_default
from armillary.distribute.replica._policy import check_annotations
from armillary.distribute.strategies._devices import Device, as_device
from armillary.distribute.strategies._layouts import SingleLayout
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
