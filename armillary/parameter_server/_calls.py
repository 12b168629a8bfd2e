"""Scheduled calls that have not ended, and which of them a worker is to run next.

Nothing here talks to workers: the dispatcher does, and tells how it went.
"""

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from armillary.parameter_server._closures import Closure, ScheduledTask
from armillary.parameter_server._strategy import Settings

# Messages that a worker has at a time: it need not wait for the coordinator between.
_DEPTH = 2
# Calls that are shorter go to a worker several in a message, for so long.
_MESSAGE_SECONDS = 0.02
# After so many lost workers in a row, it is the call that ends them.
_MOST_LOSSES = 5


class Running(NamedTuple):
    """A call that a worker runs.

    Attributes:
        closure: The call.
        begun: When it was sent.
        message: The number of the first call of the message that it went in.
    """

    closure: Closure
    begun: float
    message: int


@dataclass(eq=False)
class WorkerState:
    """What the coordinator knows of a worker.

    Attributes:
        index: Its number.
        actor: How to call it.
        label: How messages call it.
        is_up: Whether it has answered.
        pid: The process that is up.
        attempt: How often it has come up or was lost.
        up_since: When it came up or was lost.
        known: The numbers of the functions that it has.
        servers: The parameter servers that it was told of.
        num_datasets: How many data sets it was told of.
        running: The calls that it runs, by number.
        reported: Those that were reported as slow; -1 for itself.
    """

    index: int
    actor: Any
    label: str = ""
    is_up: bool = False
    pid: int = 0
    attempt: int = 0
    up_since: float = field(default_factory=time.monotonic)
    known: set[int] = field(default_factory=set)
    servers: Any = None
    num_datasets: int = 0
    running: dict[int, Running] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)

    @property
    def num_messages(self) -> int:
        """How many messages it has."""
        return len({each.message for each in self.running.values()})


class Calls:
    """All calls, of which other threads than the dispatcher's add some, or wait.

    Args:
        settings: How calls are given out.
        workers: The workers.
        wake: Has the dispatcher look for calls that may begin.

    Attributes:
        workers: The workers.
        round: The calls that make one update together.
        num_applied: How many updates have been made.
        is_stopped: Whether the coordinator was shut down.
    """

    def __init__(
        self,
        settings: Settings,
        workers: Sequence[WorkerState],
        wake: Callable[[], None],
    ) -> None:
        self._settings, self.workers, self._wake = settings, workers, wake
        self.round: list[Closure] = []
        self.num_applied = 0
        self.is_stopped = False
        self._queue: collections.deque[Closure] = collections.deque()
        # Lost calls that run again; and how many threads wait for results.
        self._retried: set[int] = set()
        self._num_waiting = 0
        self._error: BaseException | None = None
        # Guards all of this; told when all calls may have ended.
        self._changed = threading.Condition()

    # What other threads call.

    def add(self, closure: Closure) -> None:
        """Queues a call."""
        with self._changed:
            if self.is_stopped:
                raise RuntimeError(
                    "A function was scheduled after `shutdown` of the coordinator. "
                    "Make another `ClusterCoordinator(strategy)`."
                )
            self._queue.append(closure)
        self._wake()

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
        self._wake()
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

    def stop(self) -> None:
        """Cancels the calls that have not ended, when the dispatcher has stopped."""
        with self._changed:
            self.is_stopped = True
            for closure in {*self._running(), *self.round, *self._queue}:
                if not closure.value.has_ended:
                    closure.cancel("the coordinator was shut down")
            self._queue.clear()
            self.round.clear()
            for worker in self.workers:
                worker.running.clear()
            self._changed.notify_all()

    @property
    def _is_idle(self) -> bool:
        return not (self._queue or self.round or self._running())

    def _running(self) -> list[Closure]:
        return [r.closure for w in self.workers for r in w.running.values()]

    # What the dispatcher asks.

    def begin(self) -> Iterator[tuple[WorkerState, list[Closure]]]:
        """Yields the calls that may begin, by message, and notes that they run."""
        if self._settings.is_synchronous:
            yield from self._begin_round()
            return
        depth = _DEPTH if self._settings.max_staleness is None else 1
        while True:
            free = [w for w in self.workers if w.is_up and w.num_messages < depth]
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
            yield worker, closures

    def _may_begin(self) -> bool:
        """Returns whether staleness stays bounded if one more call begins.

        Each call that runs will see the updates since it began, and at most one more
        of each other one that runs.
        """
        most = self._settings.max_staleness
        if most is None:
            return True
        running = self._running()
        return len(running) <= most and all(
            self.num_applied - closure.begun_at + len(running) <= most
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
                    self.fail(failed.error)
                    return None
                if closure.is_ready:
                    self._queue.remove(closure)
                    return closure
        return None

    def _take_more(self, worker: WorkerState, task: ScheduledTask) -> list[Closure]:
        """Returns the next short calls of a function, to go in one message."""
        if self._settings.max_staleness is not None or task.number not in worker.known:
            return []
        # A part of the queue only: other workers shall have work at its end.
        share = len(self._queue) // (_DEPTH * len(self.workers))
        count = min(share, int(_MESSAGE_SECONDS / max(task.seconds, 1e-6)) - 1)
        taken: list[Closure] = []
        while len(taken) < count:
            closure = self._queue[0]
            if closure.task is not task or not closure.is_ready:
                break
            taken.append(self._queue.popleft())
        return taken

    def _begin_round(self) -> Iterator[tuple[WorkerState, list[Closure]]]:
        """Begins a round, if every worker is up, or calls of lost workers again."""
        if not all(worker.is_up for worker in self.workers):
            return
        if not self.round:
            self._fill_round()
        running = self._running()
        begun = [
            (worker, [closure])
            for worker, closure in zip(self.workers, self.round, strict=False)
            if closure not in running and not closure.value.has_ended
        ]
        # All are noted before the first can fail, which would end the round.
        for worker, closures in begun:
            self._note(worker, closures)
        yield from begun

    def _fill_round(self) -> None:
        """Takes a call for each worker, or fewer if somebody waits for them."""
        with self._changed:
            count = len(self._queue)
            if count < len(self.workers) and not (count and self._num_waiting):
                return
            while len(self.round) < len(self.workers):
                closure = self._take()
                if closure is None:
                    break
                if self.round and closure.task is not self.round[0].task:
                    # An update is made of calls of one function.
                    self._queue.appendleft(closure)
                    break
                self.round.append(closure)

    def _note(self, worker: WorkerState, closures: list[Closure]) -> None:
        now = time.monotonic()
        for closure in closures:
            closure.begun_at = self.num_applied
            worker.running[closure.number] = Running(closure, now, closures[0].number)

    def partial_error(self, task: ScheduledTask) -> ValueError | None:
        """Returns what is wrong with a round that has too few calls; mostly nothing."""
        count, num_workers = len(self.round), len(self.workers)
        is_whole = count == num_workers or not self._settings.is_synchronous
        if is_whole or not (task.spec and task.spec.has_updates):
            return None
        return ValueError(
            f"{count} call{'s' if count > 1 else ''} of `{task.name}` had no call to "
            "run with, but with `max_staleness=0` the calls of all "
            f"{num_workers} workers make one update. Schedule a multiple of the number "
            "of workers."
        )

    def oldest(self) -> int:
        """Returns the smallest number of a call that may still send something."""
        running = {number for w in self.workers for number in w.running}
        return min(running | self._retried)

    # What the dispatcher tells.

    def end(self, worker: WorkerState, closures: list[Closure]) -> None:
        """Hears of calls that have ended."""
        with self._changed:
            for closure in closures:
                worker.running.pop(closure.number, None)
                self._retried.discard(closure.number)
                worker.reported.discard(closure.number)
            self._changed.notify_all()

    @property
    def is_round_over(self) -> bool:
        """Whether all calls of a round have ended; one that is lost will run again."""
        return bool(self.round) and all(c.value.has_ended for c in self.round)

    def end_round(self) -> None:
        """Hears that the round was applied, or was not and never will be."""
        with self._changed:
            self.round.clear()
            self._changed.notify_all()

    def lose(self, worker: WorkerState, why: str) -> int:
        """Queues the calls of a lost worker before all others; returns how many."""
        lost = [each.closure for each in worker.running.values()]
        # The others have waited for the first.
        for closure in lost[:1]:
            closure.num_losses += 1
            if closure.num_losses == _MOST_LOSSES:
                closure.value.fail(_deadly_error(closure, why))
                self.fail(closure.value.error)
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
        return len(lost)

    def fail(self, error: BaseException) -> None:
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


def _deadly_error(closure: Closure, why: str) -> RuntimeError:
    return RuntimeError(
        f"Call {closure.number} of `{closure.task.name}` has lost its worker "
        f"{closure.num_losses} times in a row ({why}), so it is not run "
        "again. It may need more memory than a worker has, or end its process in "
        "another way: run the function in this process, and look at Ray's logs."
    )
