"""Sends scheduled calls to workers, with a thread for each, and takes the results."""

import atexit
import collections
import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from armillary._logging import logger
from armillary._optional import import_ray
from armillary.errors import PSUnavailableError
from armillary.parameter_server._closures import (
    Closure,
    RemoteValue,
    ScheduledTask,
    Statistics,
)
from armillary.parameter_server._server import ParameterServer
from armillary.parameter_server._strategy import ParameterServerStrategy
from armillary.parameter_server._variables import Variables
from armillary.parameter_server._worker import Failed, NotKnown, Worker

# The number of messages that a worker has at a time.
_DEPTH = 2
# Short calls share a message, up to this total time.
_MESSAGE_SECONDS = 0.02
# If a call loses this many workers in a row, the call itself is the cause.
_MOST_LOSSES = 5
_RETRY_SECONDS = 0.2


@dataclass(eq=False)
class _Message:
    """Calls of one function that a worker runs, one after the other."""

    closures: list[Closure]
    statuses: Any = None
    values: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class _ServedWorker:
    index: int
    actor: Any
    label: str
    pid: int = 0
    down_since: float = field(default_factory=time.monotonic)
    known: set[int] = field(default_factory=set)
    servers: Any = None
    num_datasets: int = 0
    messages: list[_Message] = field(default_factory=list)


class _WorkerLostError(Exception):
    """The process of a worker has ended."""


class Scheduler:
    """The calls of one coordinator, and the threads that serve its workers."""

    def __init__(self, strategy: ParameterServerStrategy, variables: Variables) -> None:
        self._strategy = strategy
        self._variables = variables
        self.servers = list(map(self._make_server, range(strategy.num_ps)))
        self.workers = list(map(self._make_worker, range(strategy.num_workers)))
        self.statistics = Statistics()
        self.is_stopped = False
        # Guards all attributes that threads write; notified when a thread may continue.
        self._changed = threading.Condition()
        self._queue: collections.deque[Closure] = collections.deque()
        # All calls that have not ended, by number, in order.
        self._open: dict[int, Closure] = {}
        self._error: BaseException | None = None
        self._num_added = 0
        # Each worker builds new data sets before its next call.
        self.datasets: list[tuple[int, Any]] = []
        self._is_broken = False
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), daemon=True)
            for worker in self.workers
        ]
        watch = threading.Thread(target=self._watch_servers, daemon=True)
        self._threads.append(watch)
        for thread in self._threads:
            thread.start()
        # This runs before Ray ends, because a thread may wait in Ray for a worker that
        # never started.
        atexit.register(self.stop)

    def _make_server(self, index: int) -> Any:
        actor = import_ray().remote(ParameterServer)
        return actor.options(**self._strategy.actor_options("ps", index)).remote()

    def _make_worker(self, index: int) -> _ServedWorker:
        options = self._strategy.actor_options("worker", index)
        actor = import_ray().remote(Worker).options(**options)
        strategy = self._strategy
        made = actor.remote(index, strategy.num_workers, strategy.axis_name)
        return _ServedWorker(index, made, self._strategy.name_task("worker", index))

    def _watch_servers(self) -> None:
        """Warns about parameter servers that have not started in time.

        Calls that need a server wait for it without a limit.
        """
        ray = import_ray()
        seconds = self._strategy.report_seconds
        greetings = [server.greet.remote() for server in self.servers]
        ray.wait(greetings, num_returns=len(greetings), timeout=seconds)
        up, _ = ray.wait(greetings, num_returns=len(greetings), timeout=0)
        for index, greeting in enumerate(greetings):
            if greeting not in up and not self.is_stopped:
                logger.warning(
                    "%s is not up after %.0f s: %s.",
                    self._strategy.name_task("ps", index),
                    seconds,
                    self._strategy.describe_absent("ps", index),
                )

    # The threads of users call these methods.

    def add(self, task: ScheduledTask, inputs: list[Any]) -> RemoteValue:
        with self._changed:
            if self.is_stopped:
                raise RuntimeError(
                    "A function was scheduled after `shutdown` of the coordinator. "
                    "Make another `ClusterCoordinator(strategy)`."
                )
            self._num_added += 1
            closure = Closure(self._num_added, task, inputs)
            failed = [value for value in closure.awaited if value.has_failed]
            if failed and (error := failed[0].future.exception()) is not None:
                self._fail(closure, error)
            else:
                self._open[closure.number] = closure
                self._queue.append(closure)
            self._changed.notify_all()
        return closure.value

    def wait(self) -> None:
        """Waits until every call has ended; raises the error of a failed call."""
        with self._changed:
            self._changed.wait_for(self.is_done)
        self.raise_error()

    def is_done(self) -> bool:
        return not self._open

    def raise_error(self) -> None:
        """Raises the error of a failed call, once, when all calls have ended."""
        if self._error is not None:
            with self._changed:
                self._changed.wait_for(self.is_done)
                error, self._error = self._error, None
            if error is not None:
                raise error

    def revive(self) -> None:
        """Replaces parameter servers that are gone, while no call runs."""
        if not self._is_broken:
            return
        ray = import_ray()
        servers = [*self.servers]
        for index, server in enumerate(servers):
            try:
                ray.get(server.greet.remote(), timeout=10)
            except ray.exceptions.RayError:
                servers[index] = self._make_server(index)
        self._is_broken = False
        self.servers = servers
        self._variables.put_all(servers)

    @contextlib.contextmanager
    def needing_servers(self) -> Iterator[None]:
        """Raises `PSUnavailableError` if a server is lost in the code inside it."""
        try:
            yield
        except import_ray().exceptions.RayActorError as error:
            raise self._break(error) from error

    def stop(self) -> None:
        """Ends the actors and threads; calls that have not ended are cancelled."""
        with self._changed:
            self.is_stopped = True
            for closure in self._open.values():
                closure.cancel("the coordinator was shut down")
            self._open.clear()
            self._queue.clear()
            self._changed.notify_all()
        ray = import_ray()
        if ray.is_initialized():
            for actor in (*self.servers, *(w.actor for w in self.workers)):
                ray.kill(actor)
        for thread in self._threads:
            thread.join(timeout=10.0)
        atexit.unregister(self.stop)

    # The thread of a worker calls these methods.

    def _serve(self, worker: _ServedWorker) -> None:
        while not self.is_stopped:
            try:
                self._go_on(worker)
            except (_WorkerLostError, import_ray().exceptions.RayError) as error:
                if worker.pid and not self.is_stopped:
                    self._lose(worker, error)
                elif not self.is_stopped:
                    self._wait_for(worker, error)
            except Exception as error:  # On any error, no caller may wait forever.
                with self._changed:
                    for each in [*worker.messages]:
                        self._end(worker, each, [Failed(error)] * len(each.closures))
                    self._error = self._error or error
                    self._cancel_queue()
                    self._changed.notify_all()

    def _go_on(self, worker: _ServedWorker) -> None:
        """Greets a new worker, sends calls, or waits for the end of some calls."""
        if not worker.pid:
            greeting = worker.actor.greet.remote()
            pid, address = self._get(worker, greeting, None)
            worker.label = f"worker {worker.index} (process {pid} on {address})"
            worker.known = set()
            worker.servers = None
            worker.num_datasets = 0
            worker.pid = pid
            return
        message, step = self._take(worker), self._send
        if message is None and worker.messages:
            message, step = worker.messages[0], self._finish
        if message is None:
            return
        try:
            step(worker, message)
        except _WorkerLostError:
            raise
        except Exception as error:  # An argument may have been deleted, for example.
            self._end(worker, message, [Failed(error)] * len(message.closures))

    def _take(self, worker: _ServedWorker) -> _Message | None:
        """Returns the next calls for a worker; if it has none, waits for some."""
        with self._changed:
            if not worker.messages:
                self._changed.wait_for(lambda: self._find(worker), _RETRY_SECONDS)
            closure = self._find(worker)
            if closure is None or self.is_stopped:
                return None
            self._queue.remove(closure)
            message = _Message([closure, *self._take_more(worker, closure)])
            worker.messages.append(message)
            return message

    def _find(self, worker: _ServedWorker) -> Closure | None:
        """Returns the next call that a worker may begin."""
        ahead = len(worker.messages)
        if not self._queue or ahead >= _DEPTH:
            return None
        # Workers without calls come first.
        idle = [w for w in self.workers if w.pid and not w.messages]
        if ahead and len(self._queue) <= len(idle):
            return None
        return next((call for call in self._queue if call.is_ready), None)

    def _take_more(self, worker: _ServedWorker, first: Closure) -> list[Closure]:
        """Returns the next short calls of a function, to go in one message."""
        task, taken = first.task, list[Closure]()
        if task.number not in worker.known:
            return taken
        # It takes only a part of the queue, so that other workers have work at the end.
        share = len(self._queue) // (_DEPTH * len(self.workers))
        count = min(share, int(_MESSAGE_SECONDS / max(task.seconds, 1e-6)) - 1)
        while len(taken) < count:
            if self._queue[0].task is not task or not self._queue[0].is_ready:
                break
            taken.append(self._queue.popleft())
        return taken

    def _send(self, worker: _ServedWorker, message: _Message) -> None:
        closures = message.closures
        task = closures[0].task
        if worker.servers is not self.servers:
            worker.servers = self.servers
            worker.actor.connect.remote(worker.servers)
            worker.known.clear()
        for number, reference in self.datasets[worker.num_datasets :]:
            worker.num_datasets += 1
            worker.actor.make_dataset.remote(number, reference)
        # The arguments are passed one by one, because Ray does not fetch the results of
        # other calls inside a list.
        arguments = [array for closure in closures for array in closure.arguments()]
        if task.number not in worker.known:
            asked = worker.actor.prepare.remote(
                worker.pid, task.number, task.reference, *arguments
            )
            spec = self._get(worker, asked, f"traces `{task.name}`")
            if isinstance(spec, Failed):
                raise spec.error
            with self.needing_servers():
                self._variables.place(task, spec, worker.servers)
            worker.actor.place.remote(task.number, task.placed)
            worker.known.add(task.number)
        run = worker.actor.run.options(num_returns=1 + len(closures))
        numbers = [closure.number for closure in closures]
        with self._changed:
            oldest = next(iter(self._open), numbers[0])
        results = run.remote(worker.pid, task.number, numbers, oldest, *arguments)
        message.statuses, *message.values = results

    def _finish(self, worker: _ServedWorker, message: _Message) -> None:
        first = message.closures[0]
        doing = f"runs call {first.number} of `{first.task.name}`"
        self._end(worker, message, self._get(worker, message.statuses, doing))

    def _end(
        self, worker: _ServedWorker, message: _Message, statuses: list[Any]
    ) -> None:
        """Sets the results or the errors of the calls of a message."""
        with self._changed:
            if self.is_stopped:
                return
            for i, closure in enumerate(message.closures):
                self._open.pop(closure.number, None)
                if i >= len(statuses):  # An earlier call of the message has failed.
                    closure.cancel()
                elif isinstance(status := statuses[i], Failed):
                    error = status.error
                    if status.lost_server is not None:
                        error = self._break(error, status.lost_server)
                    self._fail(closure, error)
                else:
                    self.statistics.count(status.staleness)
                    closure.task.seconds = status.seconds
                    closure.value.future.set_result(message.values[i])
            worker.messages.remove(message)  # Last, because an error may end this.
            self._changed.notify_all()

    def _wait_for(self, worker: _ServedWorker, error: Exception) -> None:
        """Waits before a worker is greeted again; warns once if it does not start."""
        seconds = time.monotonic() - worker.down_since
        if seconds > self._strategy.report_seconds:
            message = "%s is not up after %.0f s (%s)."
            logger.warning(message, worker.label, seconds, _first_line(error))
            worker.down_since = math.inf
        time.sleep(_RETRY_SECONDS)

    def _lose(self, worker: _ServedWorker, error: Exception) -> None:
        """Puts the calls of a lost worker back at the front of the queue."""
        with self._changed:
            lost = [closure for each in worker.messages for closure in each.closures]
            worker.messages.clear()
            worker.pid = 0
            worker.down_since = time.monotonic()
            self._queue.extendleft(reversed(lost))
            self.statistics.num_lost += 1
            for first in lost[:1]:  # The others were waiting for the first call.
                first.num_losses += 1
                if first.num_losses == _MOST_LOSSES:
                    message = (
                        f"Call {first.number} of `{first.task.name}` has lost its "
                        f"worker {_MOST_LOSSES} times in a row ({error}), so it is not "
                        "run again. It may need more memory than a worker has: run "
                        "the function in this process, and look at Ray's logs."
                    )
                    self._fail(first, RuntimeError(message))
            if self._error is not None:
                self._cancel_queue()
            self._changed.notify_all()
        message = "%s is lost (%s). Its %d calls are run again; Ray restarts it."
        logger.warning(message, worker.label, error, len(lost))

    def _fail(self, closure: Closure, error: BaseException) -> None:
        """Remembers the first error, and cancels the calls that have not begun."""
        closure.fail(error)
        if self._error is None:
            self._error = error
        self._cancel_queue()

    def _cancel_queue(self) -> None:
        for closure in self._queue:
            closure.cancel()
            self._open.pop(closure.number, None)
        self._queue.clear()

    def _break(self, error: BaseException, which: Any = "(one)") -> PSUnavailableError:
        """Notes that a server is gone; returns the error to raise."""
        self._is_broken = True
        return PSUnavailableError(
            f"Parameter server {which} is gone ({_first_line(error)}), and with it "
            "the changes of its variables since the last `join`. Restore the last "
            "checkpoint and schedule further calls: the next one starts a new server, "
            "and fills all servers from the coordinator's objects."
        )

    def _get(self, worker: _ServedWorker, reference: Any, doing: str | None) -> Any:
        """Returns the answer of a worker; logs a warning if it takes long.

        Args:
            worker: The worker that was asked.
            reference: Ray's reference to the answer.
            doing: The work of the worker, for the log; `None` if it may not have
                started.
        """
        ray = import_ray()
        seconds = self._strategy.report_seconds
        try:
            try:
                answer = ray.get(reference, timeout=seconds)
            except ray.exceptions.GetTimeoutError:
                absent = self._strategy.describe_absent
                why = absent("worker", worker.index) if doing is None else f"it {doing}"
                message = "%s has made no progress for %.0f s: %s."
                logger.warning(message, worker.label, seconds, why)
                answer = ray.get(reference)
        except ray.exceptions.RayActorError as error:
            raise _WorkerLostError(_first_line(error)) from error
        if isinstance(answer, NotKnown):  # Ray has restarted the idle worker.
            raise _WorkerLostError("its process has ended")
        return answer


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
