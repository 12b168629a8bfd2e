"""A worker: runs scheduled functions, between reading variables and sending changes."""

import collections
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from armillary._optional import import_ray
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import MoreBatches
from armillary.parameter_server._data import Datasets, WorkerStrategy, offered
from armillary.parameter_server._program import TaskProgram, TaskSpec
from armillary.parameter_server._server import (
    ArrayType,
    Part,
    Place,
    Push,
    fetch,
    join,
    places_to_read,
    to_host,
)
from armillary.parameter_server._shipping import unship
from armillary.state._holders import is_claimed
from armillary.state._lift import State
from armillary.typing import PyTree


class ShippedTask(NamedTuple):
    """A scheduled function, as workers get it."""

    payload: bytes
    types: tuple[ArrayType, ...]


class Dynamic:
    """Stands for an argument that each call has of its own: an array."""


class PlacedTask(NamedTuple):
    """Where the variables of a scheduled function live."""

    places: dict[int, tuple[Place, ...]]
    updates: tuple[Any, ...]


class Done(NamedTuple):
    """How a call ended well."""

    staleness: int
    seconds: float


class Failed(NamedTuple):
    """How a call ended badly."""

    error: BaseException
    lost_server: int | None = None


class NotKnown(NamedTuple):
    """A worker was asked that was started anew since the coordinator greeted it."""


class _ServerLostError(Exception):
    def __init__(self, server: int, error: BaseException) -> None:
        super().__init__(f"parameter server {server} is gone: {error}")
        self.server = server


Ahead = dict[int, tuple[tuple[Part, ...], tuple[int, Any]]]
"""What was read before its call began: by server, the parts and the answer."""


class Worker:
    """The actor."""

    def __init__(self, index: int, num_workers: int) -> None:
        self._strategy = WorkerStrategy(index, num_workers)
        self._datasets = Datasets(self._strategy)
        self._servers: list[Any] = []
        self._tasks: dict[int, _Task] = {}

    def greet(self) -> tuple[int, str]:
        """Returns the process number and the address of the machine."""
        return os.getpid(), import_ray().util.get_node_ip_address()

    def connect(self, servers: list[Any]) -> None:
        """Takes the parameter servers, which forgets what was placed before."""
        self._servers = servers
        for task in self._tasks.values():
            task.placed = None

    def make_dataset(self, number: int, payload: bytes) -> None:
        """Builds this worker's data set."""
        self._datasets.make(number, lambda: unship(payload, (), self._find))

    def prepare(
        self, pid: int, number: int, shipped: ShippedTask, *arrays: Any
    ) -> TaskSpec | Failed | NotKnown:
        """Traces a function, for arguments such as these."""
        if pid != os.getpid():
            return NotKnown()
        try:
            if number not in self._tasks:
                held = [type_.zeros() for type_ in shipped.types]
                call = unship(shipped.payload, held, self._find)
                self._tasks[number] = _Task(call, shipped.types, self._strategy)
            return self._tasks[number].trace(arrays, self._datasets)[0].spec
        except Exception as error:
            return _failed(error)

    def place(self, number: int, placed: PlacedTask) -> None:
        """Takes where the variables of a function live."""
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
        ahead: Ahead = {}
        for i, call in enumerate(calls):
            start, own = time.perf_counter(), arrays[i * size : (i + 1) * size]
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
        self, task: "_Task", call: int, oldest: int, arrays: Any, ahead: Any, last: bool
    ) -> tuple[int, Any, Ahead]:
        """Runs one call; returns its staleness, its result, and what it read ahead.

        Unless it is the last one, servers answer to what it sends with what the next
        call is to read: a message less for each of them.
        """
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
        """Returns what servers answered."""
        ray, lost = import_ray(), import_ray().exceptions
        answers: dict[int, Any] = {}
        for server, reference in asked.items():
            try:
                answer = ray.get(reference)
                answers[server] = fetch(answer) if isinstance(answer, tuple) else answer
            except (lost.RayActorError, lost.ObjectLostError) as error:
                raise _ServerLostError(server, error) from error
        return answers

    def _find(self, name: str) -> Any:
        return self._strategy if name == "strategy" else None


def _failed(error: Exception) -> Failed:
    """Returns an error that can be sent, with a note of where it was raised."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"It was raised on a worker:\n{trace}")
    return Failed(error.with_traceback(None))


class _Task:
    """One function on this worker, with a program for each kind of arguments."""

    def __init__(
        self,
        call: tuple[Callable[..., Any], Any, Any],
        types: tuple[ArrayType, ...],
        strategy: WorkerStrategy,
    ) -> None:
        self._fn, args, kwargs = call
        self._leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=is_claimed)
        objects = [leaf for leaf in self._leaves if is_claimed(leaf)]
        state = State([(self._fn, ""), *((leaf, "") for leaf in objects)])
        self._strategy, self._types = strategy, types
        self._flat = FlatState(state, strategy)
        # How many batches a call takes from each data set, by kind of its arguments.
        self._counts: dict[Any, dict[int, int]] = {}
        self._programs: dict[Any, TaskProgram] = {}
        self.placed: PlacedTask | None = None

    def trace(
        self, arrays: Sequence[Any], datasets: Datasets
    ) -> tuple[TaskProgram, dict[int, int]]:
        """Returns the program for arrays, and for the next batches, such as these.

        And how many batches it takes of each data set.
        """
        counts = self._counts.setdefault(_kinds(list(arrays)), {})
        while True:
            arguments = datasets.peek(counts), list(arrays)
            key = _kinds(arguments)
            if (program := self._programs.get(key)) is not None:
                return program, counts
            types = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(*_kind(leaf)), arguments
            )
            try:
                with self._strategy.scope():
                    program = TaskProgram(self._call, self._flat, types, self._fn)
            except MoreBatches as more:
                counts[more.index] = counts.get(more.index, 0) + 1
            else:
                self._programs[key] = program

    def _call(self, batches: dict[int, list[PyTree]], arrays: list[Any]) -> PyTree:
        given = iter(arrays)
        args, kwargs = self._tree.unflatten(
            next(given) if isinstance(leaf, Dynamic) else leaf for leaf in self._leaves
        )
        with offered(batches):
            return self._fn(*args, **kwargs)

    def reads(self, spec: TaskSpec) -> dict[int, tuple[Part, ...]]:
        """Returns the parts to read from each server."""
        reads: dict[int, list[Part]] = collections.defaultdict(list)
        for slot in spec.reads:
            for place in places_to_read(self._places[slot]):
                reads[place.server].append(place.part)
        # To send anything, a call must know at which version it began.
        for slot in (*spec.updated, *spec.additions):
            for place in self._places[slot]:
                reads[place.server] += ()
        return {server: tuple(parts) for server, parts in reads.items()}

    def join(
        self,
        spec: TaskSpec,
        reads: dict[int, tuple[Part, ...]],
        answers: dict[int, tuple[int, Any]],
    ) -> dict[int, Any]:
        """Returns the variables that a call reads."""
        found: dict[Part, np.ndarray] = {}
        for server, (_, arrays) in answers.items():
            found.update(zip(reads[server], arrays, strict=True))
        values: dict[int, Any] = {}
        for slot in spec.reads:
            whole, type_ = join(self._places[slot], found), self._types[slot]
            # The program uses an array where it lies; to make one of JAX would copy.
            values[slot] = whole if type_.impl is None else type_.from_host(whole)
        return values

    def divide(
        self, spec: TaskSpec, gradients: list[list[Any]], additions: list[Any]
    ) -> dict[int, tuple[dict[Any, dict[Part, Any]], dict[Part, Any]]]:
        """Returns what is to be sent to each server: updates and additions."""
        sent: Any = collections.defaultdict(lambda: (collections.defaultdict(dict), {}))
        assert self.placed is not None
        for update, key, leaves in zip(
            spec.updates, self.placed.updates, gradients, strict=True
        ):
            for slot, leaf in zip(update.param_slots, leaves, strict=True):
                for place in self._places[slot]:
                    cut = place.cut(np.asarray(leaf))
                    sent[place.server][0][key][place.part] = cut
        for slot, leaf in zip(spec.additions, additions, strict=True):
            for place in self._places[slot]:
                sent[place.server][1][place.part] = place.cut(np.asarray(leaf))
        return {
            server: (dict(updates), added) for server, (updates, added) in sent.items()
        }

    @property
    def _places(self) -> dict[int, tuple[Place, ...]]:
        assert self.placed is not None, "a function runs before it is placed"
        return self.placed.places


def _kinds(tree: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(map(_kind, leaves))


def _kind(leaf: Any) -> tuple[tuple[int, ...], Any]:
    if isinstance(leaf, str | bytes):
        raise TypeError(
            f"A scheduled function was given the result of another one that holds "
            f"{leaf!r}. Only arrays and numbers go from call to call: return those."
        )
    return np.shape(leaf), jax.dtypes.result_type(leaf)


def _to_host(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(
            "A scheduled function returned a random key, which cannot be sent. Return "
            "its words, `jax.random.key_data(key)`."
        )
    return to_host(leaf) if isinstance(leaf, jax.Array) else leaf
