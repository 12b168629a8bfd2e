"""Gives scheduled calls to workers, and calls of lost workers to others.

One thread does it, and owns all that is written here. It waits for events: a call was
scheduled, a worker has answered, somebody waits.
"""

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from armillary._logging import logger
from armillary.cluster._ray import import_ray
from armillary.distribute.parameter_server._actors import make_server, make_worker
from armillary.distribute.parameter_server._closures import Closure, ScheduledTask
from armillary.distribute.parameter_server._settings import Settings
from armillary.distribute.parameter_server._variables import Variables
from armillary.distribute.parameter_server._worker import Done, Failed, NotKnown
from armillary.errors import PSUnavailableError

# Messages that a worker has at a time: it need not wait for the coordinator between.
_DEPTH = 2
# Calls that are shorter go to a worker several in a message, for so long.
_MESSAGE_SECONDS = 0.02
_RETRY_SECONDS = 0.2
_LOOK_SECONDS = 1.0
# After so many lost workers in a row, it is the call that ends them.
_MOST_LOSSES = 5


class _Running(NamedTuple):
    closure: Closure
    begun: float
    # The number of the first call of the message that it went in.
    message: int


@dataclass(eq=False)
class _Worker:
    index: int
    actor: Any
    label: str = ""
    is_up: bool = False
    # The process that is up, and how many were before it.
    pid: int = 0
    attempt: int = 0
    up_since: float = field(default_factory=time.monotonic)
    known: set[int] = field(default_factory=set)
    running: dict[int, _Running] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)

    @property
    def num_messages(self) -> int:
        return len({each.message for each in self.running.values()})


@dataclass
class Statistics:
    """What has been counted since the last `take`.

    Attributes:
        num_calls: Calls that ended well.
        total_staleness: Sum of their staleness, in updates.
        max_staleness: The largest.
        num_lost: Workers lost.
    """

    num_calls: int = 0
    total_staleness: int = 0
    max_staleness: int = 0
    num_lost: int = 0


class Dispatcher:
    """The thread.

    Args:
        settings: How calls are given out.
        variables: Where variables live.
    """

    def __init__(self, settings: Settings, variables: Variables) -> None:
        self._settings, self._variables = settings, variables
        self.servers = [
            make_server(settings.options_of("ps", index))
            for index in range(settings.num_ps)
        ]
        self._workers = [
            _Worker(
                index,
                make_worker(
                    index,
                    settings.num_workers,
                    is_synchronous=settings.is_synchronous,
                    options=settings.options_of("worker", index),
                ),
            )
            for index in range(settings.num_workers)
        ]
        self._datasets: dict[int, Any] = {}
        self._queue: collections.deque[Closure] = collections.deque()
        self._round: list[Closure] = []
        # Lost calls that run again; and how many threads wait for results.
        self._retried: set[int] = set()
        self._num_waiting = 0
        self._error: BaseException | None = None
        self._num_applied = 0
        self._is_broken = self.is_stopped = False
        self.statistics = Statistics()
        # Guards the queue, the error and the counts; told when all calls have ended.
        self._changed = threading.Condition()
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        for worker in self._workers:
            self._events.put(partial(self._greet, worker))

    # What other threads call.

    def add(self, closure: Closure) -> None:
        """Queues a call.

        Raises:
            RuntimeError: If the coordinator was shut down.
        """
        with self._changed:
            if self.is_stopped:
                raise RuntimeError(
                    "A function was scheduled after `shutdown` of the coordinator. "
                    "Make another `ClusterCoordinator(strategy)`."
                )
            self._queue.append(closure)
        self._events.put(self._give_out)

    def add_dataset(self, number: int, reference: Any) -> None:
        """Has a data set built by every worker, now and whenever one is new."""

        def add() -> None:
            self._datasets[number] = reference
            for worker in self._workers:
                if worker.is_up:
                    self._make_dataset(worker, number)

        self._events.put(add)

    def wait(self) -> None:
        """Waits until every call has ended; raises what one of them raised."""
        with self.waiting(), self._changed:
            self._changed.wait_for(lambda: self._is_idle)
        self.raise_error()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Lets a round begin that is not whole: no more calls come meanwhile."""
        with self._changed:
            self._num_waiting += 1
        self._events.put(self._give_out)
        try:
            yield
        finally:
            with self._changed:
                self._num_waiting -= 1

    def raise_error(self) -> None:
        """Raises what a call raised, once, when all others have ended."""
        with self._changed:
            if self._error is None:
                return
            self._changed.wait_for(lambda: self._is_idle)
            error, self._error = self._error, None
        raise error

    def is_done(self) -> bool:
        """Returns whether every call has ended."""
        with self._changed:
            return self._is_idle

    def revive(self) -> None:
        """Replaces parameter servers that are gone, while no call runs."""
        if not self._is_broken:
            return
        ray = import_ray()
        for index, server in enumerate(self.servers):
            try:
                ray.get(server.greet.remote(), timeout=10)
            except ray.exceptions.RayError:
                options = self._settings.options_of("ps", index)
                self.servers[index] = make_server(options)
        self._is_broken = False
        self._variables.put_all(self.servers)

        def connect() -> None:
            for worker in self._workers:
                if worker.is_up:
                    worker.actor.connect.remote(self.servers)
                    worker.known.clear()

        self._events.put(connect)

    def break_(
        self, error: BaseException, index: int | None = None
    ) -> PSUnavailableError:
        """Hears that a server is gone; returns the error to raise."""
        self._is_broken = True
        which = "A parameter server" if index is None else f"Parameter server {index}"
        return PSUnavailableError(
            f"{which} is gone ({_first_line(error)}), and with it what its variables "
            "held since the last `join`. Restore the last checkpoint and schedule on: "
            "the next call starts a new one, and fills all of them from the "
            "coordinator's objects."
        )

    def stop(self) -> None:
        """Ends the thread and the actors; calls that have not ended are cancelled."""
        self._events.put(None)
        self._thread.join()
        with self._changed:
            self.is_stopped = True
            running = [r.closure for w in self._workers for r in w.running.values()]
            for closure in {*running, *self._round, *self._queue}:
                if not closure.value.has_ended:
                    closure.cancel("the coordinator was shut down")
            self._queue.clear()
            self._round.clear()
            for worker in self._workers:
                worker.running.clear()
            self._changed.notify_all()
        ray = import_ray()
        if ray.is_initialized():
            for actor in (*self.servers, *(w.actor for w in self._workers)):
                ray.kill(actor)

    @property
    def _is_idle(self) -> bool:
        return (
            not self._queue
            and not self._round
            and not any(worker.running for worker in self._workers)
        )

    # What the thread does.

    def _run(self) -> None:
        looked = time.monotonic()
        while True:
            try:
                event = self._events.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                event = self._report_slow
            if event is None:
                return
            try:
                event()
                if time.monotonic() - looked > _LOOK_SECONDS:
                    looked = time.monotonic()
                    self._report_slow()
            except Exception as error:
                # A fault of this thread must not leave others waiting for ever.
                self._fail(error)

    def _ask(self, reference: Any, then: Callable[[Any], None]) -> None:
        """Calls `then` with the future of a reference, once it has ended."""
        future = reference.future()
        future.add_done_callback(lambda f: self._events.put(partial(then, f)))

    def _greet(self, worker: _Worker) -> None:
        self._ask(worker.actor.greet.remote(), partial(self._greeted, worker))

    def _greeted(self, worker: _Worker, future: Any) -> None:
        error = future.exception()
        if error is not None:
            worker.label = f"worker {worker.index} ({_first_line(error)})"
            timer = threading.Timer(
                _RETRY_SECONDS, self._events.put, [partial(self._greet, worker)]
            )
            timer.daemon = True
            timer.start()
            return
        pid, address = future.result()
        worker.label = f"worker {worker.index} (process {pid} on {address})"
        worker.pid, worker.attempt = pid, worker.attempt + 1
        worker.reported.clear()
        worker.actor.connect.remote(self.servers)
        worker.known.clear()
        worker.is_up = True
        for number in self._datasets:
            self._make_dataset(worker, number)
        self._give_out()

    def _make_dataset(self, worker: _Worker, number: int) -> None:
        worker.actor.make_dataset.remote(number, self._datasets[number])

    def _give_out(self) -> None:
        if self._settings.is_synchronous:
            self._give_out_round()
            return
        while True:
            free = [
                worker
                for worker in self._workers
                if worker.is_up and worker.num_messages < self._depth
            ]
            if not free or not self._may_begin():
                return
            worker = min(free, key=lambda w: (w.num_messages, w.index))
            # Nobody may see calls that are neither queued nor running.
            with self._changed:
                closure = self._take()
                if closure is None:
                    return
                closures = [closure, *self._take_more(worker, closure.task)]
                self._note(worker, closures)
            self._begin(worker, closures)

    @property
    def _depth(self) -> int:
        return _DEPTH if self._settings.max_staleness is None else 1

    def _may_begin(self) -> bool:
        """Returns whether staleness stays bounded if one more call begins.

        Each call that runs will see the updates since it began, and at most one more
        of each other one that runs.
        """
        most = self._settings.max_staleness
        if most is None:
            return True
        running = [r.closure for w in self._workers for r in w.running.values()]
        return len(running) <= most and all(
            self._num_applied - closure.begun_at + len(running) <= most
            for closure in running
        )

    def _take(self) -> Closure | None:
        """Returns the next call whose inputs are there."""
        with self._changed:
            for closure in list(self._queue):
                failed = closure.failed_input
                if failed is not None:
                    self._queue.remove(closure)
                    closure.value.fail(failed.error)
                    self._fail(failed.error)
                    return None
                if closure.is_ready:
                    self._queue.remove(closure)
                    return closure
        return None

    def _take_more(self, worker: _Worker, task: ScheduledTask) -> list[Closure]:
        """Returns the next short calls of a function, to go in one message."""
        if self._settings.max_staleness is not None or task.number not in worker.known:
            return []
        # A part of the queue only: other workers shall have work at its end.
        share = len(self._queue) // (_DEPTH * len(self._workers))
        count = min(share, int(_MESSAGE_SECONDS / max(task.seconds, 1e-6)) - 1)
        taken: list[Closure] = []
        while len(taken) < count:
            closure = self._queue[0]
            if closure.task is not task or not closure.is_ready:
                break
            taken.append(self._queue.popleft())
        return taken

    def _give_out_round(self) -> None:
        """Begins a round, if every worker is up, or calls of lost workers again."""
        if not all(worker.is_up for worker in self._workers):
            return
        if not self._round:
            self._fill_round()
        running = {r.closure for w in self._workers for r in w.running.values()}
        begun = [
            (worker, closure)
            for worker, closure in zip(self._workers, self._round, strict=False)
            if closure not in running and not closure.value.has_ended
        ]
        # All are noted before the first can fail, which would end the round.
        for worker, closure in begun:
            self._note(worker, [closure])
        for worker, closure in begun:
            self._begin(worker, [closure])

    def _fill_round(self) -> None:
        """Takes a call for each worker, or fewer if somebody waits for them."""
        with self._changed:
            count = len(self._queue)
            if count < len(self._workers) and not (count and self._num_waiting):
                return
            while len(self._round) < len(self._workers):
                closure = self._take()
                if closure is None:
                    break
                if self._round and closure.task is not self._round[0].task:
                    # An update is made of calls of one function.
                    self._queue.appendleft(closure)
                    break
                self._round.append(closure)

    def _note(self, worker: _Worker, closures: list[Closure]) -> None:
        """Takes down that a worker runs calls of one message."""
        now = time.monotonic()
        for closure in closures:
            closure.begun_at = self._num_applied
            worker.running[closure.number] = _Running(closure, now, closures[0].number)

    def _begin(self, worker: _Worker, closures: list[Closure]) -> None:
        try:
            self._send(worker, closures)
        except Exception as error:  # Such as an argument that was deleted.
            self._failed(worker, closures, error)

    def _send(self, worker: _Worker, closures: list[Closure]) -> None:
        closure, task = closures[0], closures[0].task
        if task.number in worker.known:
            self._start(worker, closures)
            return
        if task.reference is None:
            task.reference = import_ray().put(task.shipped)
        # In a list, Ray would not fetch results of other calls.
        asked = worker.actor.prepare.remote(
            worker.pid, task.number, task.reference, *closure.arguments()
        )
        self._ask(asked, partial(self._prepared, worker, worker.attempt, closure))

    def _prepared(
        self, worker: _Worker, attempt: int, closure: Closure, future: Any
    ) -> None:
        task = closure.task
        spec = self._answer(worker, attempt, closure, future)
        if spec is None:
            return
        if isinstance(spec, Failed):
            self._failed(worker, [closure], spec.error)
            return
        try:
            self._place(task, spec)
        except import_ray().exceptions.RayActorError as error:
            self._failed(worker, [closure], self.break_(error))
            return
        except Exception as error:
            self._failed(worker, [closure], error)
            return
        worker.actor.place.remote(task.number, task.placed)
        worker.known.add(task.number)
        self._start(worker, [closure])

    def _place(self, task: ScheduledTask, spec: Any) -> None:
        if task.placed is None:
            task.spec = spec
            task.placed = self._variables.place(
                task.number, task.numbers, spec, task.transformations, self.servers
            )

    def _start(self, worker: _Worker, closures: list[Closure]) -> None:
        task, is_synchronous = closures[0].task, self._settings.is_synchronous
        is_partial = len(self._round) < len(self._workers)
        if is_synchronous and is_partial and (task.spec and task.spec.has_updates):
            self._failed(worker, closures, self._partial_error(task))
            return
        run = worker.actor.run.options(num_returns=1 + len(closures))
        statuses, *values = run.remote(
            worker.pid,
            task.number,
            [closure.number for closure in closures],
            self._oldest(),
            # Not in a list, where Ray would not fetch results of other calls.
            *(array for closure in closures for array in closure.arguments()),
        )
        self._ask(
            statuses, partial(self._finished, worker, worker.attempt, closures, values)
        )

    def _partial_error(self, task: ScheduledTask) -> ValueError:
        count, num_workers = len(self._round), len(self._workers)
        return ValueError(
            f"{count} call{'s' if count > 1 else ''} of `{task.name}` had no call to "
            "run with, but with `max_staleness=0` the calls of all "
            f"{num_workers} workers make one update. Schedule a multiple of the number "
            "of workers."
        )

    def _oldest(self) -> int:
        """Returns the smallest number of a call that may still send something."""
        running = {number for w in self._workers for number in w.running}
        return min(running | self._retried)

    def _finished(
        self,
        worker: _Worker,
        attempt: int,
        closures: list[Closure],
        values: list[Any],
        future: Any,
    ) -> None:
        statuses = self._answer(worker, attempt, closures[0], future)
        if statuses is None:
            return
        if isinstance(statuses, Failed):
            statuses = [statuses]
        for closure, status, value in zip(closures, statuses, values, strict=False):
            if isinstance(status, Done):
                self._count(status)
                closure.task.seconds = status.seconds
                closure.value.set(value)
                continue
            error = status.error
            if status.lost_server is not None:
                error = self.break_(error, status.lost_server)
            closure.value.fail(error)
            self._fail(error)
        for closure in closures[len(statuses) :]:
            closure.cancel()
        self._ended(worker, closures)

    def _count(self, status: Done) -> None:
        self._num_applied += 1
        counts = self.statistics
        counts.num_calls += 1
        counts.total_staleness += status.staleness
        counts.max_staleness = max(counts.max_staleness, status.staleness)

    def _answer(
        self, worker: _Worker, attempt: int, closure: Closure, future: Any
    ) -> Any:
        """Returns what a worker answered; `None` if it is gone, or no longer asked."""
        if closure.number not in worker.running or attempt != worker.attempt:
            return None
        error = future.exception()
        if error is None:
            if isinstance(future.result(), NotKnown):
                # Ray has started it anew, while it had nothing to do.
                self._lose(worker, RuntimeError("its process has ended"))
                return None
            return future.result()
        exceptions = import_ray().exceptions
        if isinstance(error, exceptions.RayActorError):
            self._lose(worker, error)
            return None
        return Failed(error)

    def _lose(self, worker: _Worker, error: BaseException) -> None:
        """Queues the calls of a lost worker again, before all others."""
        lost = [each.closure for each in worker.running.values()]
        # The others have waited for the first.
        for closure in lost[:1]:
            closure.num_losses += 1
            if closure.num_losses == _MOST_LOSSES:
                closure.value.fail(_deadly_error(closure, error))
                self._fail(closure.value.error)
        lost = [closure for closure in lost if not closure.value.has_ended]
        with self._changed:
            worker.running.clear()
            worker.is_up, worker.up_since = False, time.monotonic()
            worker.attempt += 1
            self._retried.update(closure.number for closure in lost)
            if not self._settings.is_synchronous:
                self._queue.extendleft(reversed(lost))
            if self._error is not None:
                self._cancel()
            self._changed.notify_all()
        self.statistics.num_lost += 1
        logger.warning(
            "%s is lost (%s). %d calls of it are run again; Ray starts it anew.",
            worker.label,
            _first_line(error),
            len(lost),
        )
        self._greet(worker)
        self._give_out()

    def _failed(
        self, worker: _Worker, closures: list[Closure], error: BaseException
    ) -> None:
        for closure in closures:
            closure.value.fail(error)
        self._fail(error)
        self._ended(worker, closures)

    def _ended(self, worker: _Worker, closures: list[Closure]) -> None:
        with self._changed:
            for closure in closures:
                worker.running.pop(closure.number, None)
                self._retried.discard(closure.number)
                worker.reported.discard(closure.number)
            is_whole = self._round and not any(w.running for w in self._workers)
        if is_whole:
            self._end_round()
        with self._changed:
            self._changed.notify_all()
        self._give_out()

    def _end_round(self) -> None:
        if any(not closure.value.has_ended for closure in self._round):
            return  # A worker is lost, and its call will run again.
        if all(closure.value.is_ready for closure in self._round):
            calls = [closure.number for closure in self._round]
            ray = import_ray()
            try:
                found = ray.get([s.commit.remote(calls) for s in self.servers])
            except ray.exceptions.RayActorError as error:
                self._fail(self.break_(error))
            except ray.exceptions.RayError as error:
                self._fail(error)
            else:
                different = [number for numbers in found for number in numbers]
                if different:
                    self._fail(self._variables.different_error(different))
        with self._changed:
            self._round.clear()

    def _fail(self, error: BaseException) -> None:
        """Remembers the first error, and cancels the calls that have not begun."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._cancel()
            self._changed.notify_all()

    def _cancel(self) -> None:
        while self._queue:
            closure = self._queue.popleft()
            self._retried.discard(closure.number)
            closure.cancel()

    def _report_slow(self) -> None:
        seconds = self._settings.report_seconds
        now = time.monotonic()
        for worker in self._workers:
            late = not worker.is_up and now - worker.up_since > seconds
            if late and not worker.reported:
                worker.reported.add(-1)
                logger.warning(
                    "%s is not up after %.0f s. It waits for a machine with room for "
                    "it, or cannot start.",
                    worker.label or f"worker {worker.index}",
                    now - worker.up_since,
                )
            # The others wait for the first.
            for number, (closure, begun, _) in [*worker.running.items()][:1]:
                if now - begun > seconds and number not in worker.reported:
                    worker.reported.add(number)
                    logger.warning(
                        "%s has made no progress for %.0f s: it runs call %d of `%s`.",
                        worker.label,
                        now - begun,
                        number,
                        closure.task.name,
                    )


def _deadly_error(closure: Closure, error: BaseException) -> RuntimeError:
    return RuntimeError(
        f"Call {closure.number} of `{closure.task.name}` has lost its worker "
        f"{closure.num_losses} times in a row ({_first_line(error)}), so it is not run "
        "again. It may need more memory than a worker has, or end its process in "
        "another way: run the function in this process, and look at Ray's logs."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
