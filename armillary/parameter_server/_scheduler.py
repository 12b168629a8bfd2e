"""Sends scheduled calls to workers, with a thread for each, and takes the results."""

import atexit
import collections
import math
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from armillary._logging import logger
from armillary._optional import import_ray
from armillary.parameter_server._closures import (
    ANOTHER_FAILED,
    Closure,
    RemoteValue,
    ScheduledTask,
    Statistics,
)
from armillary.parameter_server._node import first_line
from armillary.parameter_server._server_group import ServerGroup
from armillary.parameter_server._strategy import ParameterServerStrategy
from armillary.parameter_server._variables import Variables
from armillary.parameter_server._worker import Failed, NotKnown, Worker

# The number of messages that a worker has at a time.
_DEPTH = 2
# Short calls share a message, up to this total time.
_MESSAGE_SECONDS = 0.02
# If a call loses this many workers in a row, the call itself is the cause.
_MAX_LOSSES = 5
_RETRY_SECONDS = 0.2


@dataclass(eq=False)
class _Message:
    """Calls of one function that a worker runs, one after the other."""

    closures: list[Closure]
    statuses: Any = None
    values: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class _ServedWorker:
    """A worker, as the thread that serves it knows it."""

    index: int
    actor: Any
    label: str
    pid: int = 0  # 0 until it has answered for the first time
    down_since: float = field(default_factory=time.monotonic)
    # The numbers of the tasks that it has traced, and what else it has received.
    known: set[int] = field(default_factory=set)
    servers: Any = None
    num_datasets: int = 0
    messages: list[_Message] = field(default_factory=list)  # not answered yet


class _WorkerLostError(Exception):
    """The process of a worker has ended."""


class Scheduler:
    """The calls of one coordinator, and the threads that serve its workers.

    The threads of users call the public methods, and the thread of a worker runs
    `_serve`. Both hold `_changed` while they read or write what they share.
    """

    def __init__(self, strategy: ParameterServerStrategy, variables: Variables) -> None:
        self._strategy = strategy
        self._variables = variables
        self.server_group = ServerGroup(strategy)
        self.workers = [self._make_worker(i) for i in range(strategy.num_workers)]
        self.statistics = Statistics()
        self.is_stopped = False
        # Guards all attributes that threads write; notified when a thread may continue.
        self._changed = threading.Condition()
        self._queue: collections.deque[Closure] = collections.deque()
        # All calls that have not ended, by number, in order.
        self._open: dict[int, Closure] = {}
        self._error: BaseException | None = None
        self._num_added = 0
        # Each worker builds new datasets before its next call.
        self.datasets: list[tuple[int, Any]] = []
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), daemon=True)
            for worker in self.workers
        ]
        watch = threading.Thread(
            target=self.server_group.watch, args=(lambda: self.is_stopped,), daemon=True
        )
        self._threads.append(watch)
        for thread in self._threads:
            thread.start()
        # This runs before Ray ends, because a thread may wait in Ray for a worker that
        # never started.
        atexit.register(self.stop)

    @property
    def servers(self) -> list[Any]:
        """The actors of the parameter servers."""
        return self.server_group.actors

    def _make_worker(self, index: int) -> _ServedWorker:
        options = self._strategy.actor_options("worker", index)
        actor = import_ray().remote(Worker).options(**options)
        strategy = self._strategy
        made = actor.remote(index, strategy.num_workers, strategy.axis_name)
        return _ServedWorker(index, made, self._strategy.name_task("worker", index))

    def add(self, task: ScheduledTask, inputs: list[Any]) -> RemoteValue:
        """Queues a call; it fails immediately if a result that it takes has failed."""
        with self._changed:
            if self.is_stopped:
                raise RuntimeError(
                    "A function was scheduled after `shutdown` of the coordinator. "
                    "Make another `ClusterCoordinator(strategy)`."
                )
            self._num_added += 1
            closure = Closure(self._num_added, task, inputs)
            failed = [value for value in closure.awaited if value.has_failed]
            error = failed[0].future.exception() if failed else None
            if error is not None:
                self._note_first_error(closure, error)
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
        if self._error is None:
            return
        with self._changed:
            self._changed.wait_for(self.is_done)
            error = self._error
            self._error = None
        if error is not None:
            raise error

    def drop(self, why: str) -> None:
        """Cancels calls that have not begun, waits for the others, drops their error.

        `why` is the reason for callers that ask for the result of a cancelled call.
        """
        with self._changed:
            self._cancel_queue(why)
            self._changed.wait_for(self.is_done)
            self._error = None

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

    def _serve(self, worker: _ServedWorker) -> None:
        """Runs in the thread of one worker until `stop`, also if the worker is lost."""
        while not self.is_stopped:
            try:
                self._proceed(worker)
            except (_WorkerLostError, import_ray().exceptions.RayError) as error:
                if self.is_stopped:
                    return
                if worker.pid:
                    self._lose(worker, error)
                else:
                    self._wait_for(worker, error)
            except Exception as error:  # On any error, no caller may wait forever.
                with self._changed:
                    for message in [*worker.messages]:
                        self._end_all(worker, message, error)
                    self._error = self._error or error
                    self._cancel_queue()
                    self._changed.notify_all()

    def _proceed(self, worker: _ServedWorker) -> None:
        """Greets a new worker, sends calls, or waits for the end of some calls."""
        if not worker.pid:
            self._greet(worker)
            return
        message = self._take(worker)
        step = self._send
        if message is None and worker.messages:
            message = worker.messages[0]
            step = self._finish
        if message is None:
            return
        try:
            step(worker, message)
        except _WorkerLostError:
            raise
        except Exception as error:  # An argument may have been deleted, for example.
            self._end_all(worker, message, error)

    def _greet(self, worker: _ServedWorker) -> None:
        """Waits until the process of a worker answers; it knows nothing yet."""
        greeting = worker.actor.greet.remote()
        pid, address = self._get(worker, greeting, None)
        worker.label = f"worker {worker.index} (process {pid} on {address})"
        worker.known = set()
        worker.servers = None
        worker.num_datasets = 0
        worker.pid = pid

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
        num_ahead = len(worker.messages)
        if not self._queue or num_ahead >= _DEPTH:
            return None
        # Workers without calls come first.
        started = [known for known in self.workers if known.pid]
        num_idle = sum(not known.messages for known in started)
        if num_ahead and len(self._queue) <= num_idle:
            return None
        return next((call for call in self._queue if call.is_ready), None)

    def _take_more(self, worker: _ServedWorker, first: Closure) -> list[Closure]:
        """Returns the next short calls of a function, to go in one message."""
        task = first.task
        taken: list[Closure] = []
        if task.number not in worker.known:
            return taken
        # It takes only a part of the queue, so that other workers have work at the end.
        share = len(self._queue) // (_DEPTH * len(self.workers))
        num_in_time = int(_MESSAGE_SECONDS / max(task.seconds, 1e-6))
        count = min(share, num_in_time - 1)
        while len(taken) < count:
            call = self._queue[0]
            if call.task is not task or not call.is_ready:
                break
            taken.append(self._queue.popleft())
        return taken

    def _send(self, worker: _ServedWorker, message: _Message) -> None:
        """Sends calls to a worker, after the things that it needs for them."""
        closures = message.closures
        task = closures[0].task
        self._bring_up_to_date(worker)
        # The arguments are passed one by one, because Ray does not fetch the results of
        # other calls inside a list.
        arguments: list[Any] = []
        for closure in closures:
            arguments += closure.arguments()
        if task.number not in worker.known:
            self._prepare(worker, task, arguments)
        numbers = [closure.number for closure in closures]
        with self._changed:
            oldest = next(iter(self._open), numbers[0])
        run = worker.actor.run.options(num_returns=1 + len(closures))
        results = run.remote(worker.pid, task.number, numbers, oldest, *arguments)
        message.statuses, *message.values = results

    def _bring_up_to_date(self, worker: _ServedWorker) -> None:
        """Sends a worker the servers and datasets that it does not have yet."""
        if worker.servers is not self.servers:
            worker.servers = self.servers
            worker.actor.connect.remote(worker.servers)
            worker.known.clear()
        for number, reference in self.datasets[worker.num_datasets :]:
            worker.num_datasets += 1
            worker.actor.make_dataset.remote(number, reference)

    def _prepare(
        self, worker: _ServedWorker, task: ScheduledTask, arguments: list[Any]
    ) -> None:
        """Makes a worker trace a function, and tells it where the variables are."""
        asked = worker.actor.prepare.remote(
            worker.pid, task.number, task.reference, *arguments
        )
        spec = self._get(worker, asked, f"traces `{task.name}`")
        if isinstance(spec, Failed):
            raise spec.error
        with self.server_group.needed():
            self._variables.place(task, spec, worker.servers)
        worker.actor.place.remote(task.number, task.placed)
        worker.known.add(task.number)

    def _finish(self, worker: _ServedWorker, message: _Message) -> None:
        """Waits for the end of the calls of a message, and sets their results."""
        first = message.closures[0]
        doing = f"runs call {first.number} of `{first.task.name}`"
        statuses = self._get(worker, message.statuses, doing)
        self._end(worker, message, statuses)

    def _end_all(
        self, worker: _ServedWorker, message: _Message, error: Exception
    ) -> None:
        """Sets an error for every call of a message."""
        self._end(worker, message, [Failed(error)] * len(message.closures))

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
                    continue
                status = statuses[i]
                if isinstance(status, Failed):
                    error = status.error
                    if status.lost_server is not None:
                        error = self.server_group.note_lost(error, status.lost_server)
                    self._note_first_error(closure, error)
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
            logger.warning(message, worker.label, seconds, first_line(error))
            worker.down_since = math.inf
        time.sleep(_RETRY_SECONDS)

    def _lose(self, worker: _ServedWorker, error: Exception) -> None:
        """Puts the calls of a lost worker back at the front of the queue."""
        with self._changed:
            lost: list[Closure] = []
            for message in worker.messages:
                lost += message.closures
            worker.messages.clear()
            worker.pid = 0
            worker.down_since = time.monotonic()
            self._queue.extendleft(reversed(lost))
            self.statistics.num_lost += 1
            if lost:
                # The others were waiting for the first call.
                self._count_loss(lost[0], error)
            if self._error is not None:
                self._cancel_queue()
            self._changed.notify_all()
        logger.warning(
            "%s is lost (%s). Its %d calls are run again; Ray restarts it.",
            worker.label,
            error,
            len(lost),
        )

    def _count_loss(self, closure: Closure, error: Exception) -> None:
        """Gives up a call that has lost its worker too often."""
        closure.num_losses += 1
        if closure.num_losses == _MAX_LOSSES:
            message = (
                f"Call {closure.number} of `{closure.task.name}` has lost its "
                f"worker {_MAX_LOSSES} times in a row ({error}), so it is not "
                "run again. It may need more memory than a worker has: run "
                "the function in this process, and look at Ray's logs."
            )
            self._note_first_error(closure, RuntimeError(message))

    def _note_first_error(self, closure: Closure, error: BaseException) -> None:
        """Remembers the first error, and cancels the calls that have not begun."""
        closure.fail(error)
        if self._error is None:
            self._error = error
        self._cancel_queue()

    def _cancel_queue(self, why: str = ANOTHER_FAILED) -> None:
        for closure in self._queue:
            closure.cancel(why)
            self._open.pop(closure.number, None)
        self._queue.clear()

    def _get(self, worker: _ServedWorker, reference: Any, doing: str | None) -> Any:
        """Returns the answer of a worker; logs a warning if it takes long.

        Args:
            worker: The worker that was asked.
            reference: Ray's reference to the answer.
            doing: The work of the worker, for the log; `None` if it may not have
                started.
        """
        ray = import_ray()
        try:
            answer = self._wait_for_answer(worker, reference, doing)
        except ray.exceptions.RayActorError as error:
            raise _WorkerLostError(first_line(error)) from error
        if isinstance(answer, NotKnown):  # Ray has restarted the idle worker.
            raise _WorkerLostError("its process has ended")
        return answer

    def _wait_for_answer(
        self, worker: _ServedWorker, reference: Any, doing: str | None
    ) -> Any:
        """Returns the answer of a worker; logs a warning if it takes long."""
        ray = import_ray()
        seconds = self._strategy.report_seconds
        try:
            return ray.get(reference, timeout=seconds)
        except ray.exceptions.GetTimeoutError:
            if doing is None:
                why = self._strategy.describe_absent("worker", worker.index)
            else:
                why = f"it {doing}"
            logger.warning(
                "%s has made no progress for %.0f s: %s.", worker.label, seconds, why
            )
        return ray.get(reference)
