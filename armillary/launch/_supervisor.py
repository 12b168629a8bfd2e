"""Runs a job: attempt after attempt, until it has one exit code."""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO

from armillary._checks import counted
from armillary._process import ExitCode
from armillary.launch._output import Output
from armillary.launch._process import Machines, Process, make_environment, name_signal

EVALUATOR = "evaluator"
"""The label of the evaluator."""
MAX_PAUSE_SECONDS = 60.0

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (*_STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
_TERMINATE_SECONDS = 5.0
_REPEAT_SECONDS = 1.0
_LAST_WORDS_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Job:
    """The command to run, and the options of `armillary launch`, already checked."""

    arguments: Sequence[str]
    machines: Machines
    has_evaluator: bool = False
    max_restarts: int
    pause_seconds: float
    grace_seconds: float
    logs: Mapping[str, FileIO]


def run_job(job: Job) -> ExitCode:
    """Runs a job to its end; no process of it is left after the return."""
    output = Output(job.logs)
    with (
        contextlib.closing(job.machines),
        # Ray prints pages about a lost machine, of which the supervisor says a line.
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),
    ):
        return asyncio.run(_Supervisor(job, output).run())


def find_final_code(
    cause: ExitCode, num_restarts: int, max_restarts: int
) -> ExitCode | None:
    """Returns the exit code for the end of an attempt, or `None` for a restart."""
    # The same command line will be as wrong the next time.
    if cause in {ExitCode.OK, ExitCode.USAGE}:
        return cause
    if num_restarts < max_restarts:
        return None
    return ExitCode.TOO_MANY_RESTARTS if max_restarts else cause


def find_pause(num_restarts: int, first_seconds: float) -> float:
    """Returns the seconds before the next restart: they double, up to a bound."""
    # The bound of the exponent keeps the power a number that a float can hold.
    seconds = first_seconds * 2 ** min(num_restarts, 30)
    return min(seconds, max(MAX_PAUSE_SECONDS, first_seconds))


def find_stop_code(number: int, causes: Sequence[ExitCode]) -> ExitCode:
    """Returns the exit code of a job that a signal stopped."""
    if causes and set(causes) <= {ExitCode.OK, ExitCode.PREEMPTED}:
        return max(causes)
    return ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED


class _Supervisor:
    """What the groups of a job share, and the signals that the launcher gets."""

    def __init__(self, job: Job, output: Output) -> None:
        self.job, self.output, self.say = job, output, output.say
        self.addresses: list[str] = []
        self.workers, self.evaluator = _Group(self), _Group(self, is_evaluator=True)
        self.evaluation: asyncio.Task[ExitCode] | None = None
        # The signal that stops the job, and when processes were first asked to end.
        self.stop: int | None = None
        self._asked_at: float | None = None
        # Set when nothing is to be started any more.
        self.is_ending = asyncio.Event()

    async def run(self) -> ExitCode:
        """Returns the exit code of the job."""
        loop = asyncio.get_running_loop()
        # What the launcher was started to ignore, as `nohup` does, stays ignored. Not
        # so SIGCHLD, or the kernel would forget how a child ended.
        heard = [n for n in _PASSED_ON if signal.getsignal(n) != signal.SIG_IGN]
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in heard:
            loop.add_signal_handler(number, self._receive, number)
        try:
            code = await self.workers.run()
            if self.evaluation is not None:
                code = await self._end_evaluation(self.evaluation, code)
            count = self.workers.num_restarts
            if code is not ExitCode.OK or count:
                after = f" after {counted(count, 'restart')}" if count else ""
                self.say(f"ends with exit code {code.value} ({code.name}){after}.")
            return code
        finally:
            self.workers.kill()
            self.evaluator.kill()
            # From here on, a signal ends the launcher, whose terminal may be paused.
            for number in heard:
                loop.remove_signal_handler(number)
            await self.output.finish()

    async def _end_evaluation(
        self, evaluation: "asyncio.Task[ExitCode]", code: ExitCode
    ) -> ExitCode:
        """Waits for the evaluator; returns the exit code of the job."""
        if code is ExitCode.OK and self.stop is None:
            if not evaluation.done():
                self.say("all workers have ended; waits for the evaluator.")
            return await evaluation
        self.is_ending.set()
        if self._asked_at is None:
            self._asked_at = asyncio.get_running_loop().time()
            self.evaluator.send(signal.SIGTERM)
        self.evaluator.end_after((_TERMINATE_SECONDS, signal.SIGKILL))
        await evaluation
        return code

    def _receive(self, number: int) -> None:
        """Passes a signal on; asks all processes to end if it is one of those."""
        workers, evaluator = self.workers, self.evaluator
        grace_seconds, now = self.job.grace_seconds, asyncio.get_running_loop().time()
        if number not in _STOP_SIGNALS:
            evaluator.pass_on(number)
            workers.pass_on(number)
        elif self._asked_at is None:
            self.stop, self._asked_at = number, now
            self.is_ending.set()
            evaluator.pass_on(number)
            more = f"; SIGKILL in {grace_seconds:g} s, or after a second signal"
            workers.pass_on(number, more)
            # Beside workers, the evaluator has as long as they have.
            group = workers if workers.running else evaluator
            group.end_after((grace_seconds, signal.SIGKILL))
        # One request may arrive twice: `timeout` signals a process and its group.
        elif now > self._asked_at + _REPEAT_SECONDS:
            self.say(f"{name_signal(number)} again: ends all processes now.")
            workers.end_after((0.0, signal.SIGKILL))
            evaluator.end_after((0.0, signal.SIGKILL))


class _Group:
    """Processes that start and end together: the workers, or the evaluator alone."""

    def __init__(self, supervisor: _Supervisor, *, is_evaluator: bool = False) -> None:
        self._supervisor, self._job = supervisor, supervisor.job
        self._say, self._output = supervisor.say, supervisor.output
        self._is_evaluator = is_evaluator
        self.num_restarts = 0
        self.children: list[Process] = []
        self._tails: dict[str, deque[str]] = {}
        self._ender: asyncio.Task[None] | None = None

    async def run(self) -> ExitCode:
        """Runs the processes, and again if they fail; returns what comes of it."""
        job, is_ending = self._job, self._supervisor.is_ending
        while True:
            cause = await self._run_attempt()
            if is_ending.is_set():
                return cause
            code = find_final_code(cause, self.num_restarts, job.max_restarts)
            alone = " of the evaluator alone" if self._is_evaluator else ""
            if code is not None:
                if alone and code is not ExitCode.OK:
                    self._say(f"no restart{alone}: the workers go on.")
                return code
            seconds = find_pause(self.num_restarts, job.pause_seconds)
            self.num_restarts += 1
            count = f"{self.num_restarts} of {job.max_restarts}"
            self._say(f"restart {count}{alone} in {seconds:g} s.")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_ending.wait(), seconds)
            if is_ending.is_set():
                return find_stop_code(self._supervisor.stop or 0, [])

    @property
    def running(self) -> list[Process]:
        """Those that have not ended."""
        return [child for child in self.children if not child.ended.done()]

    def pass_on(self, number: int, note: str = "") -> None:
        """Sends a signal that the launcher got to those that run, and says so."""
        if self.running:
            self._say(f"{name_signal(number)}: passed on to {self}{note}.")
        # A worker has no terminal that could hang up.
        self.send(signal.SIGTERM if number == signal.SIGHUP else number)

    def send(self, number: int) -> None:
        """Sends a signal to those that run."""
        for child in self.running:
            child.send_signal(number)

    def end_after(self, *plan: tuple[float, signal.Signals]) -> None:
        """Sends signals to those that still run, each after a pause in seconds."""

        async def follow() -> None:
            for seconds, number in plan:
                await asyncio.sleep(seconds)
                if self.running:
                    self._say(f"{number.name}: sent to {self}, which still ran.")
                    self.send(number)

        if self._ender is not None:
            self._ender.cancel()
        self._ender = asyncio.create_task(follow())

    def kill(self) -> None:
        """Ends those that run at once."""
        for child in self.children:
            child.kill()

    def __str__(self) -> str:
        numbers = [child.label.rpartition(" ")[2] for child in self.running]
        return "the evaluator" if self._is_evaluator else f"worker {', '.join(numbers)}"

    async def _run_attempt(self) -> ExitCode:
        """Runs all processes once; returns what their end means for the job."""
        self.children, failure = [], None
        try:
            await self._start()
            failure = await self._find_failure()
        except OSError as error:
            self._say(f"cannot start a process: {error}.")
            return ExitCode.FAILED
        finally:
            self.kill()
            self.end_after()
            await self._output.drain([child.label for child in self.children])
            if not self._is_evaluator:
                self._job.machines.release()
        supervisor = self._supervisor
        if failure and not (self._is_evaluator and supervisor.is_ending.is_set()):
            self._show_failure(failure)
        if supervisor.stop is not None:
            causes = [child.ended.result().cause for child in self.children]
            return find_stop_code(supervisor.stop, causes)
        return ExitCode.OK if failure is None else failure.ended.result().cause

    async def _start(self) -> None:
        supervisor, machines = self._supervisor, self._job.machines
        if supervisor.is_ending.is_set():
            return
        if self._is_evaluator:
            self._say("starts the evaluator.")
            self._start_process(EVALUATOR, None)
            return
        reserving = asyncio.create_task(machines.reserve(self._say))
        ending = asyncio.create_task(supervisor.is_ending.wait())
        await asyncio.wait({reserving, ending}, return_when=asyncio.FIRST_COMPLETED)
        if supervisor.is_ending.is_set():
            reserving.cancel()
            return
        ending.cancel()
        addresses, where = reserving.result()
        supervisor.addresses = addresses
        self._say(
            f"starts {counted(len(addresses), 'worker')}{where}, "
            f"coordinator {addresses[0]}, {machines.devices}."
        )
        for index in range(len(addresses)):
            self._start_process(f"worker {index}", index)
        if self._job.has_evaluator and supervisor.evaluation is None:
            work = supervisor.evaluator.run()
            supervisor.evaluation = asyncio.create_task(work)

    def _start_process(self, label: str, index: int | None) -> None:
        machines, arguments = self._job.machines, self._job.arguments
        environment = make_environment(
            os.environ,
            addresses=self._supervisor.addresses,
            index=index,
            devices=machines.devices,
            num_restarts=self.num_restarts,
        )
        child = machines.start(label, index, arguments, environment)
        self.children.append(child)
        self._tails[label] = self._output.add(label, child.stdout, child.stderr)

    async def _find_failure(self) -> Process | None:
        """Waits until every process has ended; returns the one that failed first."""
        failure = None
        pending = {child.ended for child in self.children}
        while pending:
            done, pending = await asyncio.wait(
                pending, return_when=asyncio.FIRST_COMPLETED
            )
            failed = [
                child
                for child in self.children
                if child.ended in done and child.ended.result().returncode != 0
            ]
            if not failed or failure is not None or self._supervisor.stop is not None:
                continue
            # Several may have ended at once: one that only reacted is not the first.
            failure = min(failed, key=lambda child: child.ended.result().is_reaction)
            if pending:
                grace_seconds = self._job.grace_seconds
                self.end_after(
                    (grace_seconds, signal.SIGTERM),
                    (_TERMINATE_SECONDS, signal.SIGKILL),
                )
                # What a worker said before it ended comes first.
                await self._output.drain([failure.label], _LAST_WORDS_SECONDS)
                self._say(
                    f"{failure.label}: {failure.ended.result()}. "
                    f"{len(pending)} of {len(self.children)} still run, and have "
                    f"{grace_seconds:g} s to end by themselves."
                )
        return failure

    def _show_failure(self, child: Process) -> None:
        """Says which process failed, and how its stderr ended."""
        ending, count = child.ended.result(), len(self.children)
        who = child.label if self._is_evaluator else f"{child.label} of {count}"
        tail = list(self._tails[child.label])
        if ending.cause is ExitCode.PREEMPTED:
            who, tail = f"{who} ended first", []
        elif count > 1:
            who += " failed first"
        lines = [f"  | {line}" for line in tail if line.strip()]
        before = [f"{who}: {ending}.{' Its stderr ended with:' if lines else ''}"]
        self._say("\n".join(before + lines))
