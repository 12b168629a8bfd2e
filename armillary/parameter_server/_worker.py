"""A worker: runs scheduled functions, between reading variables and sending changes."""

import inspect
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from armillary._optional import import_ray
from armillary.data._dataset import DistributedDataset
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import MoreBatches
from armillary.parameter_server._array_types import ArrayType, to_host
from armillary.parameter_server._data import (
    Batches,
    Datasets,
    WorkerStrategy,
    find_batches,
    offered,
)
from armillary.parameter_server._program import TaskProgram, TaskSpec
from armillary.parameter_server._server import Part, Push, fetch
from armillary.parameter_server._shipping import unship
from armillary.state._holders import is_claimed
from armillary.state._lift import State
from armillary.typing import PyTree


class ShippedTask(NamedTuple):
    """A scheduled function, as workers get it.

    Attributes:
        payload: The pickled function, and its arguments: arrays are `Dynamic`.
        types: Shape and dtype of each array of its state.
    """

    payload: bytes
    types: tuple[ArrayType, ...]


@dataclass(frozen=True)
class Dynamic:
    """Stands for an argument that each call has of its own: an array.

    Attributes:
        number: Which of them.
    """

    number: int


class PlacedTask(NamedTuple):
    """Where the variables of a scheduled function live.

    Attributes:
        parts: For each array of its state that calls read or change: the server, the
            part, and the rows (or `None`) of each part, in order.
        updates: For each update, its key.
    """

    parts: dict[int, tuple[tuple[int, Part, tuple[int, int] | None], ...]]
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


Ahead = dict[int, tuple[tuple[Part, ...], tuple[int, Any]]]
"""What was read before its call began: by server, the parts and the answer."""


class Worker:
    """The actor."""

    def __init__(self, index: int, num_workers: int, is_synchronous: bool) -> None:
        self._strategy = WorkerStrategy(
            index, num_workers, is_synchronous=is_synchronous
        )
        self._is_synchronous = is_synchronous
        self._servers: list[Any] = []
        self._tasks: dict[int, _Task] = {}
        self._datasets: Datasets = {}

    def greet(self) -> tuple[int, str]:
        """Returns the process number and the address of the machine."""
        return os.getpid(), import_ray().util.get_node_ip_address()

    def connect(self, servers: list[Any]) -> None:
        """Hears of the parameter servers, which forgets what was placed before."""
        self._servers = servers
        for task in self._tasks.values():
            task.placed = None

    def make_dataset(self, number: int, payload: bytes) -> None:
        """Builds this worker's data set; what is wrong is told when it is used."""
        try:
            dataset_fn = unship(payload, (), self._find)
            with self._strategy.scope():
                # As in TensorFlow, it may do without.
                needs_context = bool(inspect.signature(dataset_fn).parameters)
                args = (self._strategy.input_context,) if needs_context else ()
                dataset = dataset_fn(*args)
            if not isinstance(dataset, DistributedDataset):
                dataset = self._strategy.distribute_dataset(dataset)
            self._datasets[number] = Batches(dataset)
        except Exception as error:
            self._datasets[number] = error

    def prepare(
        self, pid: int, number: int, shipped: ShippedTask, *arrays: Any
    ) -> TaskSpec | Failed | NotKnown:
        """Traces a function, for arguments such as these."""
        if pid != os.getpid():
            return NotKnown()
        try:
            if number not in self._tasks:
                self._tasks[number] = _Task(shipped, self._find, self._strategy)
            return self._tasks[number].trace(arrays, self._datasets).spec
        except Exception as error:
            return _failed(error)

    def place(self, number: int, placed: PlacedTask) -> None:
        """Hears where the variables of a function live."""
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
            own = arrays[i * size : (i + 1) * size]
            is_last = i + 1 == len(calls)
            status, results[i], ahead = self._run(
                number, call, oldest, own, ahead, is_last
            )
            ended.append(status)
            if isinstance(status, Failed):
                break
        return [ended, *results]

    def _run(
        self,
        number: int,
        call: int,
        oldest: int,
        arrays: Sequence[Any],
        ahead: Ahead,
        is_last: bool,
    ) -> tuple[Done | Failed, Any, Ahead]:
        """Runs one call; returns how it ended, its result, and what it read ahead.

        Unless it is the last one, servers answer to what it sends with what the next
        call is to read: a message less for each of them.
        """
        start = time.perf_counter()
        try:
            task = self._tasks[number]
            program = task.trace(arrays, self._datasets)
            reads = task.reads(program)
            known = {
                s: held for s, (parts, held) in ahead.items() if parts == reads.get(s)
            }
            asked = [
                (server, self._servers[server].read.remote(parts))
                for server, parts in reads.items()
                if server not in known
            ]
            batches = task.take(arrays, self._datasets)
            answers = [*known.items(), *self._wait(asked)]
            values, versions = task.join(program, reads, answers)
            result, gradients, additions = program(values, (batches, arrays), call)
            result = jax.tree.map(_to_host, result)
            asked = []
            for server, (updates, added) in task.divide(
                program, gradients, additions
            ).items():
                actor, version = self._servers[server], versions.get(server, 0)
                in_round = call if self._is_synchronous else None
                push = Push(call, oldest, version, in_round, updates, added)
                reference = (
                    actor.push.remote(push)
                    if is_last
                    else actor.push_and_read.remote(push, reads[server])
                )
                asked.append((server, reference))
            staleness, ahead = 0, {}
            for server, answer in self._wait(asked):
                if not is_last:
                    answer, *read = answer
                    ahead[server] = reads[server], tuple(read)
                staleness = max(staleness, answer)
        except _ServerLostError as error:
            return Failed(RuntimeError(str(error)), error.server), None, {}
        except Exception as error:
            return _failed(error), None, {}
        return Done(staleness, time.perf_counter() - start), result, ahead

    def _wait(self, asked: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """Returns what servers answered."""
        ray = import_ray()
        answers: list[tuple[int, Any]] = []
        for server, reference in asked:
            try:
                answer = ray.get(reference)
                if isinstance(answer, tuple):
                    answer = fetch(answer)
            except (
                ray.exceptions.RayActorError,
                ray.exceptions.ObjectLostError,
            ) as error:
                raise _ServerLostError(server, error) from error
            answers.append((server, answer))
        return answers

    def _find(self, name: str) -> Any:
        if name == "strategy":
            return self._strategy
        return None if name == "nothing" else _Coordinator()


def _failed(error: Exception) -> Failed:
    """Returns an error that can be sent, with a note of where it was raised."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"It was raised on a worker:\n{trace}")
    return Failed(error.with_traceback(None))


_COORDINATOR_NAMES = (
    "schedule",
    "join",
    "done",
    "fetch",
    "create_per_worker_dataset",
    "shutdown",
    "strategy",
)


class _Coordinator:
    """Stands for the coordinator in a function that was scheduled."""

    def __getattr__(self, name: str) -> Any:
        if name not in _COORDINATOR_NAMES:
            raise AttributeError(name)
        raise RuntimeError(
            f"`{name}` of the `ClusterCoordinator` was used on a worker. Functions are "
            "scheduled, and results fetched, in the process that made it."
        )


class _ServerLostError(Exception):
    def __init__(self, server: int, error: BaseException) -> None:
        super().__init__(f"parameter server {server} is gone: {error}")
        self.server = server


class _Task:
    """One function on this worker, with a program for each kind of arguments."""

    def __init__(
        self, shipped: ShippedTask, find: Callable[[str], Any], strategy: Any
    ) -> None:
        arrays = [type_.zeros() for type_ in shipped.types]
        self._fn, args, kwargs = unship(shipped.payload, arrays, find)
        self._leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=_is_whole)
        objects = [leaf for leaf in self._leaves if is_claimed(leaf)]
        state = State([(self._fn, ""), *((leaf, "") for leaf in objects)])
        self._strategy, self._types = strategy, shipped.types
        self._flat = FlatState(state, strategy)
        # How many batches a call takes from each data set, by kind of its arguments.
        self._counts: dict[Any, dict[int, int]] = {}
        self._programs: dict[Any, TaskProgram] = {}
        self.placed: PlacedTask | None = None

    def trace(self, arrays: Sequence[Any], datasets: Datasets) -> TaskProgram:
        """Returns the program for arrays, and for the next batches, such as these."""
        while True:
            batches = self._peek(arrays, datasets)
            leaves, tree = jax.tree.flatten((batches, list(arrays)))
            key = tree, tuple(map(_kind, leaves))
            program = self._programs.get(key)
            if program is not None:
                return program
            types = [jax.ShapeDtypeStruct(*_kind(leaf)) for leaf in leaves]
            try:
                with self._strategy.scope():
                    program = TaskProgram(
                        self._call, self._flat, tree.unflatten(types), self._fn
                    )
            except MoreBatches as more:
                counts = self._counts_of(arrays)
                counts[more.index] = counts.get(more.index, 0) + 1
                continue
            self._programs[key] = program
            return program

    def take(
        self, arrays: Sequence[Any], datasets: Datasets
    ) -> dict[int, list[PyTree]]:
        """Returns the batches of a call, and goes on in the data."""
        batches = self._peek(arrays, datasets)
        for number, count in self._counts_of(arrays).items():
            find_batches(datasets, number).drop(count)
        return batches

    def _peek(
        self, arrays: Sequence[Any], datasets: Datasets
    ) -> dict[int, list[PyTree]]:
        return {
            number: find_batches(datasets, number).peek(count)
            for number, count in self._counts_of(arrays).items()
        }

    def _counts_of(self, arrays: Sequence[Any]) -> dict[int, int]:
        leaves, tree = jax.tree.flatten(list(arrays))
        return self._counts.setdefault((tree, tuple(map(_kind, leaves))), {})

    def _call(self, batches: dict[int, list[PyTree]], arrays: list[Any]) -> PyTree:
        args, kwargs = self._tree.unflatten(
            arrays[leaf.number] if isinstance(leaf, Dynamic) else leaf
            for leaf in self._leaves
        )
        with offered(batches):
            return self._fn(*args, **kwargs)

    def reads(self, program: TaskProgram) -> dict[int, tuple[Part, ...]]:
        """Returns the parts to read from each server."""
        reads: dict[int, list[Part]] = {}
        for slot in program.spec.reads:
            for server, part, _ in self._parts(slot):
                reads.setdefault(server, []).append(part)
        # To send anything, a call must know at which version it began.
        for slot in (*self._changed(program), *program.spec.additions):
            for server, _, _ in self._parts(slot):
                reads.setdefault(server, [])
        return {server: tuple(parts) for server, parts in reads.items()}

    def join(
        self,
        program: TaskProgram,
        reads: dict[int, tuple[Part, ...]],
        answers: list[tuple[int, Any]],
    ) -> tuple[dict[int, Any], dict[int, int]]:
        """Returns the variables that a call reads, and the servers' versions."""
        found: dict[Part, np.ndarray] = {}
        for server, (_, arrays) in answers:
            found.update(zip(reads[server], arrays, strict=True))
        values: dict[int, Any] = {}
        for slot in program.spec.reads:
            rows = [found[part] for _, part, _ in self._parts(slot)]
            whole = rows[0] if len(rows) == 1 else np.concatenate(rows)
            type_ = self._types[slot]
            # The program uses an array where it lies; to make one of JAX would copy.
            values[slot] = whole if type_.impl is None else type_.from_host(whole)
        return values, {server: version for server, (version, _) in answers}

    def divide(
        self,
        program: TaskProgram,
        gradients: list[list[Any]],
        additions: dict[int, Any],
    ) -> dict[int, tuple[list[Any], dict[Part, Any]]]:
        """Returns what is to be sent to each server: updates and additions."""
        placed = self._placed
        sent: dict[int, tuple[list[Any], dict[Part, Any]]] = {}
        for spec, key, leaves in zip(
            program.spec.updates, placed.updates, gradients, strict=True
        ):
            shares: dict[int, dict[Part, np.ndarray]] = {}
            for slot, leaf in zip(jax.tree.leaves(spec.params), leaves, strict=True):
                gradient = np.asarray(leaf)
                for server, part, rows in self._parts(slot):
                    share = gradient if rows is None else gradient[slice(*rows)]
                    shares.setdefault(server, {})[part] = share
            for server, share in shares.items():
                sent.setdefault(server, ([], {}))[0].append((key, share))
        for slot, addition in additions.items():
            how = program.spec.additions[slot]
            for server, part, rows in self._parts(slot):
                change = np.asarray(addition)
                share = change if rows is None else change[slice(*rows)]
                sent.setdefault(server, ([], {}))[1][part] = how, share
        return sent

    @property
    def _placed(self) -> PlacedTask:
        assert self.placed is not None, "a function runs before it is placed"
        return self.placed

    def _parts(self, slot: int) -> Any:
        return self._placed.parts[slot]

    def _changed(self, program: TaskProgram) -> set[int]:
        return {
            slot
            for spec in program.spec.updates
            for slot in jax.tree.leaves(spec.params)
        }


def _is_whole(leaf: Any) -> bool:
    return isinstance(leaf, Dynamic) or is_claimed(leaf)


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
