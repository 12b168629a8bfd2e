"""Functions that calls are scheduled of, the calls, and their results."""

import contextlib
import math
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from armillary._optional import import_ray
from armillary.distribute.program._function import objects_of
from armillary.errors import ClosureCancelledError
from armillary.parameter_server._program import TaskSpec
from armillary.parameter_server._server import type_of
from armillary.parameter_server._shipping import ship
from armillary.parameter_server._worker import Dynamic, PlacedTask, ShippedTask
from armillary.state._holders import captured, is_claimed
from armillary.state._lift import State, as_array
from armillary.typing import PyTree

_WHY = "another scheduled call failed. `schedule` and `join` raise its error"


class RemoteValue:
    """The result of a scheduled call (`tf.distribute.coordinator.RemoteValue`).

    It may be an argument of another scheduled call, which then runs after this one.
    """

    def __init__(self) -> None:
        self.future: Future[Any] = Future()  # Of Ray's reference to the result.

    def get(self) -> PyTree:
        """Returns what the function returned, with JAX arrays; waits for it.

        What the function raised is raised here, too.

        Raises:
            ClosureCancelledError: If it did not run, because another call failed.
        """
        return jax.tree.map(
            lambda leaf: jnp.asarray(leaf) if hasattr(leaf, "dtype") else leaf,
            self.fetch(),
        )

    def fetch(self) -> PyTree:
        """Returns what the function returned, with NumPy arrays; waits for it.

        What the function raised is raised here, too.

        Raises:
            ClosureCancelledError: If it did not run, because another call failed.
        """
        return import_ray().get(self.future.result())

    def wait(self) -> None:
        """Returns when the call has ended, well or badly."""
        wait([self.future])

    @property
    def has_ended(self) -> bool:
        """Whether the call has ended, well or badly, or was cancelled."""
        return self.future.done()

    @property
    def has_failed(self) -> bool:
        """Whether the call has ended badly, or did not run."""
        return self.has_ended and self.future.exception() is not None

    @property
    def is_ready(self) -> bool:
        """Whether the call has ended well."""
        return self.has_ended and self.future.exception() is None


class ScheduledTask:
    """A function that calls were scheduled of, with arguments of one structure."""

    def __init__(
        self,
        number: int,
        fn: Callable[..., Any],
        leaves: list[Any],
        tree: Any,
        named: dict[int, str],
    ) -> None:
        self.number, self.name = number, getattr(fn, "__name__", "the function")
        self.state = State([(fn, ""), *((leaf, "") for leaf in objects_of(leaves))])
        args, kwargs = tree.unflatten(
            Dynamic() if is_dynamic(leaf) else leaf for leaf in leaves
        )
        # What tells this function from others must not be freed: others would get its
        # place in memory.
        self._kept = leaves, tuple(value for _, value in captured(fn))
        self._types = self._read_types()
        # An object for each place: what a variable holds may stand elsewhere, too, and
        # is a constant there.
        stand_ins = [jnp.zeros(()) for _ in self._types]
        with self.state.swapped(stand_ins):
            payload, self.transformations = ship((fn, args, kwargs), stand_ins, named)
        self.state.watch()
        self.reference = import_ray().put(ShippedTask(payload, self._types))
        self.numbers: list[int] = []
        self.spec: TaskSpec | None = None
        self.placed: PlacedTask | None = None
        self.seconds = math.inf

    def is_current(self) -> bool:
        """Returns whether nothing that the function reaches was replaced."""
        return self.state.is_current() and self._types == self._read_types()

    def _read_types(self) -> tuple[Any, ...]:
        return tuple(type_of(as_array(array)) for array in self.state.read())


@dataclass(eq=False)
class Closure:
    """One scheduled call."""

    number: int
    task: ScheduledTask
    inputs: list[Any]
    value: RemoteValue = field(default_factory=RemoteValue)
    begun_at: int = 0
    num_losses: int = 0

    @property
    def awaited(self) -> list[RemoteValue]:
        """The results that it takes."""
        return [value for value in self.inputs if isinstance(value, RemoteValue)]

    @property
    def is_ready(self) -> bool:
        """Whether all have ended; `arguments` raises what one of them raised."""
        return all(value.has_ended for value in self.awaited)

    def arguments(self) -> list[Any]:
        """Returns its inputs for Ray, which fetches references on the worker."""
        return [
            value.future.result() if isinstance(value, RemoteValue) else value
            for value in self.inputs
        ]

    def fail(self, error: BaseException) -> None:
        """Tells that there will be no result, if there is none yet."""
        with contextlib.suppress(InvalidStateError):
            self.value.future.set_exception(error)

    def cancel(self, why: str = _WHY) -> None:
        """Ends it before it has run."""
        message = f"This call of `{self.task.name}` did not run, because {why}."
        self.fail(ClosureCancelledError(message))


@dataclass
class Statistics:
    """What has been counted since the last `take_statistics`."""

    num_calls: int = 0
    total_staleness: int = 0
    max_staleness: int = 0
    num_lost: int = 0

    def count(self, staleness: int) -> None:
        """Counts a call."""
        self.num_calls += 1
        self.total_staleness += staleness
        self.max_staleness = max(self.max_staleness, staleness)


def is_dynamic(leaf: Any) -> bool:
    """Returns whether calls of one function may differ in an argument."""
    return isinstance(leaf, RemoteValue) or (
        not is_claimed(leaf) and hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    )
