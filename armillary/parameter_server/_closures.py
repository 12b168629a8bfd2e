"""Scheduled calls, and their results."""

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from armillary._optional import import_ray
from armillary.distribute.program._function import objects_of
from armillary.errors import ClosureCancelledError
from armillary.parameter_server._array_types import type_of
from armillary.parameter_server._program import TaskSpec
from armillary.parameter_server._shipping import ship
from armillary.parameter_server._worker import (
    Dynamic,
    PlacedTask,
    ShippedTask,
)
from armillary.state._holders import is_claimed
from armillary.state._lift import State, as_array
from armillary.state._opaque import captured
from armillary.typing import PyTree


class RemoteValue:
    """The result of a scheduled call (`tf.distribute.coordinator.RemoteValue`).

    It may be an argument of another scheduled call, which then runs after this one.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._reference: Any = None
        self._error: BaseException | None = None
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """Tells the dispatcher that somebody waits."""

    def get(self) -> PyTree:
        """Returns what the function returned, with JAX arrays; waits for it.

        What the function raised is raised here, too.

        Raises:
            ClosureCancelledError: If it did not run, because another call failed.
        """
        host = self.fetch()
        return jax.tree.map(
            lambda leaf: jnp.asarray(leaf) if hasattr(leaf, "dtype") else leaf, host
        )

    def fetch(self) -> PyTree:
        """Returns what the function returned, with NumPy arrays; waits for it.

        What the function raised is raised here, too.

        Raises:
            ClosureCancelledError: If it did not run, because another call failed.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        return import_ray().get(self._reference)

    def wait(self) -> None:
        """Returns when the call has ended, well or badly."""
        with self.waiting():
            self._ended.wait()

    @property
    def is_ready(self) -> bool:
        """Whether the call has ended well."""
        return self._ended.is_set() and self._error is None

    @property
    def has_ended(self) -> bool:
        """Whether the call has ended, well or badly, or was cancelled."""
        return self._ended.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether the call has ended badly, or did not run."""
        return self._ended.is_set() and self._error is not None

    @property
    def error(self) -> BaseException:
        """Why the call has ended badly."""
        assert self._error is not None, "the call has not failed"
        return self._error

    @property
    def reference(self) -> Any:
        """Where Ray keeps the result of a call that has ended well."""
        return self._reference

    def set(self, reference: Any) -> None:
        """Hears where the result is."""
        self._reference = reference
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        """Hears that there will be none."""
        self._error = error
        self._ended.set()


class ScheduledTask:
    """A function that calls were scheduled of, with arguments of one structure.

    Args:
        number: Its number.
        fn: The function.
        leaves: Its arguments, flat: arrays and `RemoteValue` are what calls differ in.
        tree: Their structure.
        named: Names of objects that workers have, by `id`.

    Attributes:
        state: The variables that it reaches.
        reference: Where Ray keeps what workers get; `None` before the first call.
        transformations: Its optimizers, pickled.
        placed: Where its variables live; `None` before a worker has traced it.
        spec: What it does to them; likewise.
        numbers: The numbers of its variables.
        seconds: How long its last call took; infinite before the first has ended.
    """

    def __init__(
        self,
        number: int,
        fn: Callable[..., Any],
        leaves: list[Any],
        tree: Any,
        named: dict[int, str],
    ) -> None:
        self.number, self.fn = number, fn
        self.name = getattr(fn, "__name__", "the function")
        objects = objects_of(leaves)
        self.state = State([(fn, ""), *((leaf, "") for leaf in objects)])
        count = iter(range(len(leaves)))
        args, kwargs = tree.unflatten(
            Dynamic(next(count)) if is_dynamic(leaf) else leaf for leaf in leaves
        )
        # What tells this function from others must not be freed: others would get its
        # place in memory.
        self._kept = leaves, tuple(value for _, value in captured(fn))
        types = tuple(type_of(as_array(array)) for array in self.state.read())
        # An object for each place: what a variable holds may stand elsewhere, too, and
        # is a constant there.
        stand_ins = [jnp.zeros(()) for _ in types]
        with self.state.swapped(stand_ins):
            payload, self.transformations = ship((fn, args, kwargs), stand_ins, named)
        self.shipped = ShippedTask(payload, types)
        self.state.watch()
        self.reference: Any = None
        self.placed: PlacedTask | None = None
        self.spec: TaskSpec | None = None
        self.numbers: list[int] = []
        self.seconds = math.inf

    def is_current(self) -> bool:
        """Returns whether nothing that the function reaches was replaced."""
        return self.state.is_current() and self.shipped.types == tuple(
            type_of(as_array(array)) for array in self.state.read()
        )


@dataclass(eq=False)
class Closure:
    """One scheduled call.

    Attributes:
        number: Counts all calls.
        task: The function.
        inputs: Its arrays, and results of other calls.
        value: Where its result goes.
        begun_at: How many updates had been made when it was last begun.
        num_losses: How many workers were lost while they ran it.
    """

    number: int
    task: ScheduledTask
    inputs: list[Any]
    value: RemoteValue = field(default_factory=RemoteValue)
    begun_at: int = 0
    num_losses: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether all results that it takes are there."""
        return all(v.is_ready for v in self.inputs if isinstance(v, RemoteValue))

    @property
    def failed_input(self) -> RemoteValue | None:
        """A result that it takes and that will not come, if there is one."""
        values = (v for v in self.inputs if isinstance(v, RemoteValue))
        return next((value for value in values if value.has_failed), None)

    def arguments(self) -> list[Any]:
        """Returns its inputs for Ray, which fetches references on the worker."""
        return [v.reference if isinstance(v, RemoteValue) else v for v in self.inputs]

    def cancel(self, why: str = "") -> None:
        """Ends it before it has run."""
        why = why or (
            "another scheduled call failed. `schedule` and `join` raise its error"
        )
        message = f"This call of `{self.task.name}` did not run, because {why}."
        self.value.fail(ClosureCancelledError(message))


def is_dynamic(leaf: Any) -> bool:
    """Returns whether calls of one function may differ in an argument."""
    return isinstance(leaf, RemoteValue) or (
        not is_claimed(leaf) and hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    )
