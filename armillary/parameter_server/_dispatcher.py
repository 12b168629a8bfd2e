"""Sends scheduled calls to workers, and hears how they end.

One thread does it, and owns all that is written here. It waits for events: a call was
scheduled, a worker has answered, somebody waits. `_calls` knows which call is next.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from armillary._logging import logger
from armillary._optional import import_ray
from armillary.errors import PSUnavailableError
from armillary.parameter_server._calls import Calls, WorkerState
from armillary.parameter_server._closures import Closure, ScheduledTask
from armillary.parameter_server._strategy import (
    Settings,
    make_server,
    make_worker,
)
from armillary.parameter_server._variables import Variables
from armillary.parameter_server._worker import Done, Failed, NotKnown

_RETRY_SECONDS = 0.2
_LOOK_SECONDS = 1.0


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

    Attributes:
        servers: The actors of parameter servers.
        calls: The calls that have not ended.
        statistics: What was counted.
    """

    def __init__(self, settings: Settings, variables: Variables) -> None:
        self._settings, self._variables = settings, variables
        self.servers = [
            make_server(settings.options_of("ps", index))
            for index in range(settings.num_ps)
        ]
        self._workers = [
            WorkerState(
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
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.calls = Calls(
            settings, self._workers, lambda: self._events.put(self._give_out)
        )
        # Other threads add to it, and the calls that need it may come before an event.
        self._datasets: list[tuple[int, Any]] = []
        self._is_broken = False
        self.statistics = Statistics()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        for worker in self._workers:
            self._events.put(partial(self._greet, worker))

    # What other threads call.

    def add_dataset(self, number: int, reference: Any) -> None:
        """Has a data set built by every worker, now and whenever one is new."""

        def tell_all() -> None:
            for worker in self._workers:
                if worker.is_up:
                    self._tell(worker)

        self._datasets.append((number, reference))
        self._events.put(tell_all)

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
                options = self._settings.options_of("ps", index)
                servers[index] = make_server(options)
        self._is_broken = False
        self.servers = servers
        self._variables.put_all(servers)

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
        self.calls.stop()
        ray = import_ray()
        if ray.is_initialized():
            for actor in (*self.servers, *(w.actor for w in self._workers)):
                ray.kill(actor)

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
                self.calls.fail(error)

    def _ask(self, reference: Any, then: Callable[[Any], None]) -> None:
        """Calls `then` with the future of a reference, once it has ended."""
        future = reference.future()
        future.add_done_callback(lambda f: self._events.put(partial(then, f)))

    def _greet(self, worker: WorkerState) -> None:
        self._ask(worker.actor.greet.remote(), partial(self._greeted, worker))

    def _greeted(self, worker: WorkerState, future: Any) -> None:
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
        worker.servers, worker.num_datasets = None, 0
        self._tell(worker)
        worker.is_up = True
        self._give_out()

    def _tell(self, worker: WorkerState) -> None:
        """Tells a worker which servers and data sets are new since it was last told."""
        if worker.servers is not self.servers:
            worker.servers = self.servers
            worker.actor.connect.remote(self.servers)
            worker.known.clear()
        for number, reference in self._datasets[worker.num_datasets :]:
            worker.num_datasets += 1
            worker.actor.make_dataset.remote(number, reference)

    def _give_out(self) -> None:
        for worker, closures in self.calls.begin():
            self._begin(worker, closures)

    def _begin(self, worker: WorkerState, closures: list[Closure]) -> None:
        try:
            self._send(worker, closures)
        except Exception as error:  # Such as an argument that was deleted.
            self._failed(worker, closures, error)

    def _send(self, worker: WorkerState, closures: list[Closure]) -> None:
        closure, task = closures[0], closures[0].task
        # Whatever another thread did before it scheduled these calls.
        self._tell(worker)
        if task.number in worker.known:
            self._start(worker, closures)
            return
        if task.reference is None:
            task.reference = import_ray().put(task.shipped)
        # In a list, Ray would not fetch results of other calls.
        asked = worker.actor.prepare.remote(
            worker.pid, task.number, task.reference, *closure.arguments()
        )
        self._ask(asked, partial(self._prepared, worker, worker.attempt, closures))

    def _prepared(
        self, worker: WorkerState, attempt: int, closures: list[Closure], future: Any
    ) -> None:
        task = closures[0].task
        spec = self._answer(worker, attempt, closures[0], future)
        if spec is None:
            return
        if isinstance(spec, Failed):
            self._failed(worker, closures, spec.error)
            return
        try:
            self._place(task, spec)
        except import_ray().exceptions.RayActorError as error:
            self._failed(worker, closures, self.break_(error))
            return
        except Exception as error:
            self._failed(worker, closures, error)
            return
        worker.actor.place.remote(task.number, task.placed)
        worker.known.add(task.number)
        self._start(worker, closures)

    def _place(self, task: ScheduledTask, spec: Any) -> None:
        if task.placed is None:
            task.spec = spec
            task.placed = self._variables.place(
                task.number, task.numbers, spec, task.transformations, self.servers
            )

    def _start(self, worker: WorkerState, closures: list[Closure]) -> None:
        task = closures[0].task
        error = self.calls.partial_error(task)
        if error is not None:
            self._failed(worker, closures, error)
            return
        run = worker.actor.run.options(num_returns=1 + len(closures))
        statuses, *values = run.remote(
            worker.pid,
            task.number,
            [closure.number for closure in closures],
            self.calls.oldest(),
            # Not in a list, where Ray would not fetch results of other calls.
            *(array for closure in closures for array in closure.arguments()),
        )
        self._ask(
            statuses, partial(self._finished, worker, worker.attempt, closures, values)
        )

    def _finished(
        self,
        worker: WorkerState,
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
            self.calls.fail(error)
        for closure in closures[len(statuses) :]:
            closure.cancel()
        self._ended(worker, closures)

    def _count(self, status: Done) -> None:
        self.calls.num_applied += 1
        counts = self.statistics
        counts.num_calls += 1
        counts.total_staleness += status.staleness
        counts.max_staleness = max(counts.max_staleness, status.staleness)

    def _answer(
        self, worker: WorkerState, attempt: int, closure: Closure, future: Any
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

    def _lose(self, worker: WorkerState, error: BaseException) -> None:
        """Has the calls of a lost worker run again."""
        why = _first_line(error)
        count = self.calls.lose(worker, why)
        self.statistics.num_lost += 1
        logger.warning(
            "%s is lost (%s). %d calls of it are run again; Ray starts it anew.",
            worker.label,
            why,
            count,
        )
        self._greet(worker)
        self._go_on()

    def _failed(
        self, worker: WorkerState, closures: list[Closure], error: BaseException
    ) -> None:
        for closure in closures:
            closure.value.fail(error)
        self.calls.fail(error)
        self._ended(worker, closures)

    def _ended(self, worker: WorkerState, closures: list[Closure]) -> None:
        self.calls.end(worker, closures)
        self._go_on()

    def _go_on(self) -> None:
        """Ends a round whose calls have all ended, and begins what may begin."""
        if self.calls.is_round_over:
            self._end_round(self.calls.round)
        self._give_out()

    def _end_round(self, closures: list[Closure]) -> None:
        if all(closure.value.is_ready for closure in closures):
            calls = [closure.number for closure in closures]
            ray = import_ray()
            try:
                found = ray.get([s.commit.remote(calls) for s in self.servers])
            except ray.exceptions.RayActorError as error:
                self.calls.fail(self.break_(error))
            except ray.exceptions.RayError as error:
                self.calls.fail(error)
            else:
                different = [number for numbers in found for number in numbers]
                if different:
                    self.calls.fail(self._variables.different_error(different))
        self.calls.end_round()

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


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
