"""Scheduled functions, their calls, and the results.

A function is pickled with all objects that it reaches, except three kinds that are sent
as names: arrays of variables, which workers read from parameter servers; optimizers,
which run on the servers; and the strategy, because each worker has its own.
"""

import contextlib
import io
import math
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

from armillary._optional import import_ray
from armillary.distribute.program._keys import objects_of
from armillary.errors import ClosureCancelledError
from armillary.parameter_server._keras import (
    as_transformation,
    is_built_optimizer,
    make_blank,
    make_optimizer,
    reduce_keras,
)
from armillary.parameter_server._optimizers import make_stand_in
from armillary.parameter_server._program import TaskSpec
from armillary.parameter_server._server import type_of
from armillary.parameter_server._tasks import Dynamic, PlacedTask
from armillary.parameter_server._worker import ShippedTask
from armillary.state._adapters import is_leaf_variable
from armillary.state._holders import captured, is_claimed
from armillary.state._lift import State, as_array
from armillary.typing import PyTree

ANOTHER_FAILED = "another scheduled call failed. `schedule` and `join` raise its error"


class RemoteValue:
    """The result of a scheduled call (`tf.distribute.coordinator.RemoteValue`).

    It may be an argument of another scheduled call, which then runs after this one.
    """

    def __init__(self) -> None:
        self.future: Future[Any] = Future()  # to Ray's reference

    def get(self) -> PyTree:
        """Waits for the function, and returns its result with JAX arrays.

        If the function raised an exception, the same exception is raised here.

        Raises:
            ClosureCancelledError: If it did not run, because another call failed.
        """
        return jax.tree.map(_as_jax_array, self.fetch())

    def fetch(self) -> PyTree:
        """Waits for the function, and returns its result with NumPy arrays.

        If the function raised an exception, the same exception is raised here.

        Raises:
            ClosureCancelledError: If it did not run, because another call failed.
        """
        return import_ray().get(self.future.result())

    @property
    def has_ended(self) -> bool:
        """True if the call has succeeded, has failed or was cancelled."""
        return self.future.done()

    @property
    def has_failed(self) -> bool:
        """True if the call has failed, or was cancelled before it ran."""
        return self.has_ended and self.future.exception() is not None


def _as_jax_array(leaf: Any) -> Any:
    return jnp.asarray(leaf) if hasattr(leaf, "dtype") else leaf


class ScheduledTask:
    """A scheduled function, for arguments of one structure."""

    def __init__(
        self,
        number: int,
        fn: Callable[..., Any],
        leaves: list[Any],
        tree: Any,
        named: dict[int, str],
    ) -> None:
        self.number = number
        self.name = getattr(fn, "__name__", "the function")
        objects = [(leaf, "") for leaf in objects_of(leaves)]
        self.state = State([(fn, ""), *objects])
        sent = [Dynamic() if is_dynamic(leaf) else leaf for leaf in leaves]
        args, kwargs = tree.unflatten(sent)

        # Functions are compared by the identity of these objects. They are kept, so
        # that no new object gets the identity of an old one.
        captured_values = [value for _, value in captured(fn)]
        self._kept = leaves, captured_values
        self._types = self._read_types()

        # There is a new object for each place, because an array of a variable may also
        # be reached in other ways, and is a constant there.
        stand_ins = [jnp.zeros(()) for _ in self._types]
        with self.state.swapped(stand_ins):
            payload, self.transformations = ship((fn, args, kwargs), stand_ins, named)
        self.state.watch()
        self.reference = import_ray().put(ShippedTask(payload, self._types))

        # The number of each array of the state among all variables.
        self.numbers: list[int] = []
        self.spec: TaskSpec | None = None
        self.placed: PlacedTask | None = None
        # The time of the last call, by which short calls share a message.
        self.seconds = math.inf

    def is_current(self) -> bool:
        """Returns False if an object that the function reaches was replaced."""
        return self.state.is_current() and self._types == self._read_types()

    def _read_types(self) -> tuple[Any, ...]:
        return tuple(type_of(as_array(array)) for array in self.state.read())


@dataclass(eq=False)
class Closure:
    """One call of a scheduled function, until it has run.

    Attributes:
        number: The number of the call.
        task: The function.
        inputs: The arguments that may differ between calls.
        value: The result.
        num_losses: The times that a worker was lost while it ran the call.
    """

    number: int
    task: ScheduledTask
    inputs: list[Any]
    value: RemoteValue = field(default_factory=RemoteValue)
    num_losses: int = 0

    @property
    def awaited(self) -> list[RemoteValue]:
        """The results of other calls that this call takes as inputs."""
        return [value for value in self.inputs if isinstance(value, RemoteValue)]

    @property
    def is_ready(self) -> bool:
        """True if all awaited calls have ended.

        If one of them failed, `arguments` raises its error.
        """
        return all(value.has_ended for value in self.awaited)

    def arguments(self) -> list[Any]:
        """Returns the inputs for Ray, which fetches references on the worker."""
        arguments: list[Any] = []
        for value in self.inputs:
            is_result = isinstance(value, RemoteValue)
            arguments.append(value.future.result() if is_result else value)
        return arguments

    def fail(self, error: BaseException) -> None:
        """Sets an error in place of the result, if there is no result yet."""
        with contextlib.suppress(InvalidStateError):
            self.value.future.set_exception(error)

    def cancel(self, why: str = ANOTHER_FAILED) -> None:
        """Sets an error that says why the call did not run."""
        message = f"This call of `{self.task.name}` did not run, because {why}."
        self.fail(ClosureCancelledError(message))


@dataclass
class Statistics:
    """The counts since the last `take_statistics`."""

    num_calls: int = 0
    total_staleness: int = 0
    max_staleness: int = 0
    num_lost: int = 0

    def count(self, staleness: int) -> None:
        """Counts a call that has ended; its staleness is a number of versions."""
        self.num_calls += 1
        self.total_staleness += staleness
        self.max_staleness = max(self.max_staleness, staleness)


def is_dynamic(leaf: Any) -> bool:
    """Returns whether calls of one function may differ in an argument."""
    if isinstance(leaf, RemoteValue):
        return True
    is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return is_array and not is_claimed(leaf)


def ship(
    task: Any, arrays: Sequence[Any], named: dict[int, str]
) -> tuple[bytes, list[bytes]]:
    """Returns a pickled task, and the optimizers that it reaches."""
    cloudpickle = import_ray().cloudpickle
    # The objects that are sent as names, by identity.
    places: dict[int, tuple[str, Any]] = {}
    for index, array in enumerate(arrays):
        places[id(array)] = ("array", index)
    for key, name in named.items():
        places[key] = ("named", name)

    # Optimizers and their updates, by identity. The optimizers are kept, so that no new
    # object gets the identity of one of them.
    optimizers: dict[int, tuple[Any, Any]] = {}

    def number(optimizer: Any, make: Callable[[Any], Any]) -> int:
        """Returns the number of an optimizer, in the order in which they are met."""
        key = id(optimizer)
        if key not in optimizers:
            optimizers[key] = optimizer, make(optimizer)
        return [*optimizers].index(key)

    class TaskPickler(cloudpickle.CloudPickler):
        def persistent_id(self, obj: Any) -> Any:
            return places.get(id(obj))

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, optax.GradientTransformation):
                index = number(obj, lambda own: own)
                return make_stand_in, (index,)

            reduced = reduce_keras(obj)
            if reduced is NotImplemented:
                return super().reducer_override(obj)
            if is_built_optimizer(obj):
                index = number(obj, as_transformation)
                # The attributes are sent as for any object of Keras.
                _, _, *rest = reduced
                return make_optimizer, (type(obj), index), *rest
            return reduced

    buffer = io.BytesIO()
    try:
        TaskPickler(buffer, protocol=5).dump(task)
    except (TypeError, pickle.PicklingError, AttributeError) as error:
        raise TypeError(
            "A scheduled function cannot be sent to workers, since something that it "
            f"reaches cannot be pickled ({error}). Keep files, locks, threads and "
            "devices elsewhere, or make them inside the function."
        ) from error
    updates = [update for _, update in optimizers.values()]
    dumped = [_dump_transformation(update, cloudpickle) for update in updates]
    return buffer.getvalue(), dumped


def _dump_transformation(transformation: Any, cloudpickle: Any) -> bytes:
    """Returns an optimizer for parameter servers, without the values of variables."""

    class OptimizerPickler(cloudpickle.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            if is_leaf_variable(obj):
                held = {**vars(obj), "_value": None}
                return make_blank, (type(obj),), held
            reduced = reduce_keras(obj)
            if reduced is not NotImplemented:
                return reduced
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    OptimizerPickler(buffer, protocol=5).dump(tuple(transformation))
    return buffer.getvalue()
