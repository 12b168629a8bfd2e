"""A worker: runs scheduled functions, between reading variables and sending changes."""

import io
import os
import pickle
import time
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from armillary._optional import import_ray
from armillary.parameter_server._program import TaskSpec
from armillary.parameter_server._server import (
    Actor,
    ArrayType,
    Part,
    Push,
    fetch,
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
    payload: bytes
    types: tuple[ArrayType, ...]


class Done(NamedTuple):
    staleness: int
    seconds: float


class Failed(NamedTuple):
    error: BaseException
    lost_server: int | None = None


class NotKnown(NamedTuple):
    """The answer of a worker that was restarted since the coordinator greeted it."""


class _ServerLostError(Exception):
    def __init__(self, server: int, error: BaseException) -> None:
        super().__init__(f"parameter server {server} is gone: {error}")
        self.server = server


ReadAhead = dict[int, tuple[tuple[Part, ...], tuple[int, Any]]]
"""Values that were read before their call began, by server: parts and answer."""


class Worker(Actor):
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
            return self._tasks[number].trace(arrays, self._datasets)[0].spec
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
        size = len(arrays) // len(calls)
        ended: list[Done | Failed] = []
        results: list[Any] = [None] * len(calls)
        ahead: ReadAhead = {}
        for i, call in enumerate(calls):
            start = time.perf_counter()
            own = arrays[i * size : (i + 1) * size]
            last = i + 1 == len(calls)
            try:
                staleness, results[i], ahead = self._run(
                    self._tasks[number], call, oldest, own, ahead, last
                )
            except _ServerLostError as error:
                ended.append(Failed(RuntimeError(str(error)), error.server))
                break
            except Exception as error:
                ended.append(_failed(error))
                break
            ended.append(Done(staleness, time.perf_counter() - start))
        return [ended, *results]

    def _run(
        self,
        task: WorkerTask,
        call: int,
        oldest: int,
        arrays: Any,
        ahead: Any,
        last: bool,
    ) -> tuple[int, Any, ReadAhead]:
        """Runs one call; returns its staleness, its result, and values read ahead."""
        program, counts = task.trace(arrays, self._datasets)
        reads = task.reads(program.spec)
        known = {s: held for s, (parts, held) in ahead.items() if parts == reads.get(s)}
        asked = {
            server: self._servers[server].read.remote(parts)
            for server, parts in reads.items()
            if server not in known
        }
        batches = self._datasets.take(counts)
        answers = known | self._wait(asked)
        values = task.join(program.spec, reads, answers)
        result, gradients, additions = program(values, (batches, arrays), call)
        result = jax.tree.map(_to_host, result)
        asked = {}
        for server, (updates, added) in task.divide(
            program.spec, gradients, additions
        ).items():
            push = Push(call, oldest, answers[server][0], updates, added)
            actor = self._servers[server]
            if last:
                asked[server] = actor.push.remote(push)
            else:
                asked[server] = actor.push_and_read.remote(push, reads[server])
        staleness, ahead = 0, {}
        for server, answer in self._wait(asked).items():
            if not last:
                answer, *read = answer
                ahead[server] = reads[server], tuple(read)
            staleness = max(staleness, answer)
        return staleness, result, ahead

    def _wait(self, asked: dict[int, Any]) -> dict[int, Any]:
        ray = import_ray()
        lost = ray.exceptions
        answers: dict[int, Any] = {}
        for server, reference in asked.items():
            try:
                answer = ray.get(reference)
                answers[server] = fetch(answer) if isinstance(answer, tuple) else answer
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
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(
            "A scheduled function returned a random key, which cannot be sent. Return "
            "its words, `jax.random.key_data(key)`."
        )
    return to_host(leaf) if isinstance(leaf, jax.Array) else leaf


def unship(payload: bytes, arrays: Sequence[Any], strategy: Any) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            kind, value = pid
            if kind == "array":
                return arrays[value]
            return strategy if value == "strategy" else None

    return Unpickler(io.BytesIO(payload)).load()
