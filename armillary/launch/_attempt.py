"""One attempt of a job: from the start of its workers to the end of the last one."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from armillary._exit_code import ExitCode
from armillary.launch._ending import Ending, name_signal
from armillary.launch._signals import STOP_SIGNALS, as_passed_on
from armillary.launch._stop import TERMINATE_SECONDS, Stop, find_stop_code
from armillary.launch._worker import Worker


@dataclass(frozen=True, kw_only=True)
class Result:
    """What ended an attempt.

    Args:
        cause: What it means for the job.
        failure: The worker that failed first, or `None` if none did.
        is_stopped: Whether a signal to the launcher ended the attempt, after which
            nothing is to be restarted.
    """

    cause: ExitCode
    failure: Ending | None = None
    is_stopped: bool = False


class Attempt:
    """Supervises workers that have been started.

    When one fails, the others get `grace_period` seconds to notice and end by
    themselves, then SIGTERM, then SIGKILL. When the launcher is asked to stop, they get
    the same signal and `grace_period` seconds to save, then SIGKILL.

    Args:
        workers: The workers of the job.
        wait: Waits for signals, as `SignalInbox.wait` does.
        grace_period: Seconds.
        say: Shows a line of the launcher.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        wait: Callable[[float | None], list[int]],
        *,
        grace_period: float,
        say: Callable[[str], None],
    ) -> None:
        self._workers = workers
        self._wait = wait
        self._grace_period = grace_period
        self._say = say
        self._endings: list[Ending] = []
        self._failure: Ending | None = None
        self._stop: Stop | None = None
        # What is sent to those that still run, and when; in order.
        self._plan: list[tuple[float, signal.Signals]] = []

    def run(self) -> Result:
        """Returns when every worker has ended."""
        running = list(self._workers)
        while running:
            # One look at each: a worker that ends between two would end unnoticed.
            looks = [(worker, worker.poll()) for worker in running]
            running = [worker for worker, ending in looks if ending is None]
            ended = [ending for _, ending in looks if ending is not None]
            self._endings += ended
            self._note_failure(ended, len(running))
            if running:
                for number in self._wait(self._send_what_is_due(running)):
                    self._pass_on(number, running)
        return self._conclude()

    def _note_failure(self, ended: list[Ending], num_running: int) -> None:
        # Several may have ended since the last look: one that only reacted is not the
        # first.
        failed = [ending for ending in ended if ending.returncode != 0]
        failed.sort(key=lambda ending: ending.is_reaction)
        if not failed or self._failure is not None or self._stop is not None:
            return
        self._failure = failed[0]
        if num_running:
            self._say(
                f"{self._failure.label}: {self._failure.describe()}. "
                f"{num_running} of {len(self._workers)} still run, and have "
                f"{self._grace_period:g} s to end by themselves."
            )
        due = time.monotonic() + self._grace_period
        self._plan = [
            (due, signal.SIGTERM),
            (due + TERMINATE_SECONDS, signal.SIGKILL),
        ]

    def _pass_on(self, number: int, running: list[Worker]) -> None:
        is_stop = number in STOP_SIGNALS
        if is_stop and self._stop is not None:
            if self._stop.ask_again([number]):
                self._say(f"{name_signal(number)} again: ends all workers now.")
                self._plan = [(self._stop.due, signal.SIGKILL)]
            return
        text = f"{name_signal(number)}: passed on to {_name_all(running)}"
        if is_stop:
            self._stop = Stop(number, self._grace_period)
            self._plan = [(self._stop.due, signal.SIGKILL)]
            text += f"; SIGKILL in {self._grace_period:g} s, or after a second signal"
        self._say(f"{text}.")
        for worker in running:
            worker.send_signal(as_passed_on(number))

    def _send_what_is_due(self, running: list[Worker]) -> float | None:
        """Acts on the plan and returns the seconds until its next entry."""
        while self._plan:
            due, number = self._plan[0]
            remaining = due - time.monotonic()
            if remaining > 0:
                return remaining
            del self._plan[0]
            names = _name_all(running)
            self._say(f"{number.name}: sent to {names}, which still ran.")
            for worker in running:
                worker.send_signal(number)
        return None

    def _conclude(self) -> Result:
        if self._stop is not None:
            causes = [ending.cause for ending in self._endings]
            cause = find_stop_code(self._stop.number, causes)
            return Result(cause=cause, failure=self._failure, is_stopped=True)
        if self._failure is not None:
            return Result(cause=self._failure.cause, failure=self._failure)
        return Result(cause=ExitCode.OK)


def _name_all(workers: Sequence[Worker]) -> str:
    numbers = (worker.label.removeprefix("worker ") for worker in workers)
    return f"worker {', '.join(numbers)}"
