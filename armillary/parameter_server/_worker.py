"""A worker: runs scheduled functions, between reading variables and sending changes."""

import io
import os
import pickle
import time
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from armillary._optional import import_ray
from armillary.distribute._global_arrays import is_key
from armillary.parameter_server._program import TaskSpec
from armillary.parameter_server._server import (
    Actor,
    ArrayType,
    PartKey,
    Push,
    fetch_values,
    to_host,
)
from armillary.parameter_server._tasks import (
    NOWHERE,
    Datasets,
    PlacedTask,
    WorkerStrategy,
    WorkerTask,
)


class ShippedTask(NamedTuple):
    """A function as it is sent: pickled, and the types of its variables."""

    payload: bytes
    types: tuple[ArrayType, ...]


class Done(NamedTuple):
    """The status of a call that has run."""

    staleness: int
    seconds: float


class Failed(NamedTuple):
    """The status of a call that failed.

    `lost_server` is the server whose loss was the reason; `None` for other errors.
    """

    error: BaseException
    lost_server: int | None = None


class NotKnown(NamedTuple):
    """The answer of a worker that was restarted since the coordinator greeted it."""


class _ServerLostError(Exception):
    def __init__(self, server: int, error: BaseException) -> None:
        super().__init__(f"parameter server {server} is gone: {error}")
        self.server = server


ReadAhead = dict[int, tuple[tuple[PartKey, ...], tuple[int, Any]]]
"""Values that were read before their call began, by server: parts and answer."""


class Worker(Actor):
    """The process of a worker: it traces tasks, and runs them with current values."""

    def __init__(self, index: int, num_workers: int, axis_name: str) -> None:
        self._strategy = WorkerStrategy(index, num_workers, axis_name)
        self._datasets = Datasets(self._strategy)
        self._servers: list[Any] = []
        self._tasks: dict[int, WorkerTask] = {}

    def connect(self, servers: list[Any]) -> None:
        """Takes new parameter servers, and forgets the locations of variables."""
        self._servers = servers
        for task in self._tasks.values():
            task.placed = NOWHERE

    def make_dataset(self, number: int, payload: bytes) -> None:
        self._datasets.make(number, lambda: unship(payload, (), self._strategy))

    def prepare(
        self, pid: int, number: int, shipped: ShippedTask, *arrays: Any
    ) -> TaskSpec | Failed | NotKnown:
        """Traces a function for the types of some arguments."""
        if pid != os.getpid():
            return NotKnown()
        try:
            if number not in self._tasks:
                held = [type_.zeros() for type_ in shipped.types]
                call = unship(shipped.payload, held, self._strategy)
                self._tasks[number] = WorkerTask(call, shipped.types, self._strategy)
            program, _ = self._tasks[number].trace(arrays, self._datasets)
            return program.spec
        except Exception as error:
            return _failed(error)

    def place(self, number: int, placed: PlacedTask) -> None:
        self._tasks[number].placed = placed

    def run(
        self, pid: int, number: int, calls: Sequence[int], oldest: int, *arrays: Any
    ) -> list[Any]:
        """Runs calls of a function, one after the other, until one fails."""
        if pid != os.getpid():
            return [NotKnown(), *[None] * len(calls)]
        num_calls = len(calls)
        num_arrays = len(arrays) // num_calls  # of each call
        statuses: list[Done | Failed] = []
        results: list[Any] = [None] * num_calls
        ahead: ReadAhead = {}
        for i, call in enumerate(calls):
            start = time.perf_counter()
            first = i * num_arrays
            of_call = arrays[first : first + num_arrays]
            is_last = i + 1 == num_calls
            try:
                staleness, results[i], ahead = self._run(
                    self._tasks[number], call, oldest, of_call, ahead, is_last=is_last
                )
            except _ServerLostError as error:
                statuses.append(Failed(RuntimeError(str(error)), error.server))
                break
            except Exception as error:
                statuses.append(_failed(error))
                break
            statuses.append(Done(staleness, time.perf_counter() - start))
        return [statuses, *results]

    def _run(
        self,
        task: WorkerTask,
        call: int,
        oldest: int,
        arrays: Sequence[Any],
        ahead: ReadAhead,
        *,
        is_last: bool,
    ) -> tuple[int, Any, ReadAhead]:
        """Runs one call; returns its staleness, its result, and values read ahead."""
        program, counts = task.trace(arrays, self._datasets)
        reads = task.reads(program.spec)
        answers, asked = self._ask(reads, ahead)
        # The servers answer while this worker reads its data.
        batches = self._datasets.take(counts)
        answers |= self._wait(asked)
        values = task.join(program.spec, reads, answers)
        result, gradients, additions = program(values, (batches, arrays), call)
        result = jax.tree.map(_to_host, result)

        asked = {}
        messages = task.divide(program.spec, gradients, additions)
        for server, (updates, added) in messages.items():
            version, _ = answers[server]
            push = Push(call, oldest, version, updates, added)
            actor = self._servers[server]
            if is_last:
                asked[server] = actor.push.remote(push)
            else:
                # One message less: the next call finds its values read ahead.
                asked[server] = actor.push_and_read.remote(push, reads[server])

        # The call is as stale as its most stale server.
        staleness = 0
        ahead = {}
        for server, answer in self._wait(asked).items():
            if is_last:
                of_server = answer
            else:
                of_server, *read = answer
                ahead[server] = reads[server], tuple(read)
            staleness = max(staleness, of_server)
        return staleness, result, ahead

    def _ask(
        self, reads: dict[int, tuple[PartKey, ...]], ahead: ReadAhead
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        """Returns the answers that were read ahead, and references to the others."""
        answers: dict[int, Any] = {}
        asked: dict[int, Any] = {}
        for server, parts in reads.items():
            parts_ahead, answer = ahead.get(server, (None, None))
            if parts_ahead == parts:
                answers[server] = answer
            else:
                asked[server] = self._servers[server].read.remote(parts)
        return answers, asked

    def _wait(self, asked: dict[int, Any]) -> dict[int, Any]:
        """Returns the answers of servers, with the values that they refer to."""
        ray = import_ray()
        lost = ray.exceptions
        answers: dict[int, Any] = {}
        for server, reference in asked.items():
            try:
                answer = ray.get(reference)
                has_values = isinstance(answer, tuple)
                answers[server] = fetch_values(answer) if has_values else answer
            except (lost.RayActorError, lost.ObjectLostError) as error:
                raise _ServerLostError(server, error) from error
        return answers


def _failed(error: Exception) -> Failed:
    """Returns an error in a form that can be sent, with its traceback as a note."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"It was raised on a worker:\n{trace}")
    return Failed(error.with_traceback(None))


def _to_host(leaf: Any) -> Any:
    """Returns a leaf of a result in the form that is sent."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if is_key(leaf):
        raise TypeError(
            "A scheduled function returned a random key, which cannot be sent. Return "
            "its words, `jax.random.key_data(key)`."
        )
    return to_host(leaf)


def unship(payload: bytes, arrays: Sequence[Any], strategy: Any) -> Any:
    """Returns a task that `ship` has pickled, with these objects for its names."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            kind, value = pid
            if kind == "array":
                return arrays[value]
            return strategy if value == "strategy" else None

    return Unpickler(io.BytesIO(payload)).load()
