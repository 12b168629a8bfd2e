"""Runs a job: attempt after attempt, until it has one exit code."""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO

from armillary._process import ExitCode
from armillary.launch._child import Machines, Process
from armillary.launch._environment import DevicePlan, make_environment
from armillary.launch._outcome import (
    RestartPolicy,
    describe_failure,
    find_stop_code,
    name_signal,
)
from armillary.launch._output import Output

EVALUATOR = "evaluator"
"""The label of the evaluator."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (*_STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
_TERMINATE_SECONDS = 5.0
_REPEAT_SECONDS = 1.0
_LAST_WORDS_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Job:
    """The command to run, and the options of `armillary launch`, already checked.

    Args:
        arguments: What follows `python` on the command line of each process.
        logs: A log file for each process by its label, or none at all. They are closed
            at the end.
    """

    arguments: Sequence[str]
    machines: Machines
    has_evaluator: bool = False
    devices: DevicePlan
    max_restarts: int
    pause_seconds: float
    grace_seconds: float
    logs: Mapping[str, FileIO]


def run_job(job: Job) -> ExitCode:
    """Runs a job to its end; no process of it is left after the return.

    It must be called in the main thread, where signals arrive.
    """
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(Output(job.logs))
        # Ray prints pages about a lost machine, of which the supervisor says a line.
        nothing = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(nothing))
        stack.callback(job.machines.close)
        return asyncio.run(_Supervisor(job, output).run())


class _Group:
    """Processes that end together: the workers of one attempt, or the evaluator."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.children: list[Process] = []
        self._say = say
        self._ender: asyncio.Task[None] | None = None

    @property
    def running(self) -> list[Process]:
        return [child for child in self.children if not child.ended.done()]

    def pass_on(self, number: int, note: str = "") -> None:
        """Sends a signal that the launcher got to those that run, and says so."""
        if self.running:
            self._say(f"{name_signal(number)}: passed on to {self._name()}{note}.")
        # A worker has no terminal that could hang up.
        self.send(signal.SIGTERM if number == signal.SIGHUP else number)

    def send(self, number: int) -> None:
        for child in self.running:
            child.send_signal(number)

    def end_after(self, *plan: tuple[float, signal.Signals]) -> None:
        """Sends signals to those that still run, each after a pause in seconds.

        It takes the place of an earlier plan.
        """
        if self._ender is not None:
            self._ender.cancel()
        self._ender = asyncio.create_task(self._follow(plan))

    def kill(self) -> None:
        for child in self.children:
            child.kill()

    async def _follow(self, plan: Sequence[tuple[float, signal.Signals]]) -> None:
        for seconds, number in plan:
            await asyncio.sleep(seconds)
            if self.running:
                self._say(f"{number.name}: sent to {self._name()}, which still ran.")
                self.send(number)

    def _name(self) -> str:
        labels = [child.label for child in self.running]
        if labels == [EVALUATOR]:
            return "the evaluator"
        return f"worker {', '.join(label.rpartition(' ')[2] for label in labels)}"


class _Supervisor:
    def __init__(self, job: Job, output: Output) -> None:
        self._job = job
        self._output, self._say = output, output.say
        self._policy = RestartPolicy(job.max_restarts, job.pause_seconds)
        self._addresses: list[str] = []
        self._tails: dict[str, deque[str]] = {}
        self._workers, self._evaluator = _Group(self._say), _Group(self._say)
        self._has_trained = False
        # The signal that stops the job, and when processes were first asked to end.
        self._stop: int | None = None
        self._asked_at: float | None = None
        # Set when nothing is to be started any more.
        self._is_ending = asyncio.Event()

    async def run(self) -> ExitCode:
        """Returns the exit code of the job."""
        loop = asyncio.get_running_loop()
        # What the launcher was started to ignore, as `nohup` does, stays ignored. Not
        # so SIGCHLD, or the kernel would forget how a child ended.
        numbers = [
            number
            for number in (*_PASSED_ON, signal.SIGCHLD)
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN
        ]
        for number in numbers:
            loop.add_signal_handler(number, self._receive, number)
        try:
            return await self._run()
        finally:
            self._workers.kill()
            self._evaluator.kill()
            # From here on, a signal ends the launcher, whose terminal may be paused.
            for number in numbers:
                loop.remove_signal_handler(number)
            await self._output.finish()

    async def _run(self) -> ExitCode:
        evaluation = None
        if self._job.has_evaluator:
            evaluation = asyncio.create_task(self._evaluate())
        code = await self._train()
        if evaluation is not None:
            code = await self._end_evaluation(evaluation, code)
        count = self._policy.num_restarts
        if code is not ExitCode.OK or count:
            after = f" after {count} restart{'s' if count > 1 else ''}" if count else ""
            self._say(f"ends with exit code {code.value} ({code.name}){after}.")
        return code

    async def _train(self) -> ExitCode:
        """Runs the workers, and again if they fail; returns what comes of it."""
        while True:
            cause = await self._run_attempt()
            if self._stop is not None:
                return cause
            code = self._policy.find_exit_code(cause)
            if code is not None:
                return code
            await self._pause(self._policy)
            if self._stop is not None:
                return find_stop_code(self._stop, [])

    async def _run_attempt(self) -> ExitCode:
        """Runs all workers once; returns what their end means for the job."""
        group = self._workers = _Group(self._say)
        try:
            try:
                await self._start_workers()
            except OSError as error:
                index = len(group.children)
                who = f"worker {index}" if index else "the workers"
                self._say(f"cannot start {who}: {error}.")
                return ExitCode.FAILED
            failure = await self._find_failure(group)
        finally:
            group.kill()
            await self._output.drain([child.label for child in group.children])
            self._job.machines.release()
        if failure is not None:
            self._show_failure(failure)
        causes = [child.ended.result().cause for child in group.children]
        if self._stop is not None:
            return find_stop_code(self._stop, causes)
        return ExitCode.OK if failure is None else failure.ended.result().cause

    async def _start_workers(self) -> None:
        machines, devices = self._job.machines, self._job.devices
        self._addresses = await machines.reserve(self._say, self._is_ending)
        if self._is_ending.is_set():
            return
        count = len(self._addresses)
        self._say(
            f"starts {count} worker{'s' if count > 1 else ''}{machines.describe()}, "
            f"coordinator {self._addresses[0]}, {devices.describe()}."
        )
        for index in range(count):
            self._start(self._workers, index, self._policy.num_restarts)

    def _start(self, group: _Group, index: int | None, num_restarts: int) -> Process:
        environment = make_environment(
            os.environ,
            addresses=self._addresses,
            index=index,
            devices=self._job.devices,
            num_restarts=num_restarts,
        )
        label = EVALUATOR if index is None else f"worker {index}"
        machines = self._job.machines
        child = machines.start(label, index, self._job.arguments, environment)
        group.children.append(child)
        self._tails[label] = self._output.add(label, child.stdout, child.stderr)
        return child

    async def _find_failure(self, group: _Group) -> Process | None:
        """Waits until every worker has ended; returns the one that failed first.

        When one fails, the others get the grace period to notice and end by themselves,
        then SIGTERM, then SIGKILL.
        """
        failure = None
        pending = {child.ended for child in group.children}
        while pending:
            done, pending = await asyncio.wait(
                pending, return_when=asyncio.FIRST_COMPLETED
            )
            failed = [
                child
                for child in group.children
                if child.ended in done and child.ended.result().returncode != 0
            ]
            if not failed or failure is not None or self._stop is not None:
                continue
            # Several may have ended at once: one that only reacted is not the first.
            failure = min(failed, key=lambda child: child.ended.result().is_reaction)
            if pending:
                grace_seconds = self._job.grace_seconds
                group.end_after(
                    (grace_seconds, signal.SIGTERM),
                    (_TERMINATE_SECONDS, signal.SIGKILL),
                )
                # What a worker said before it ended comes first.
                await self._output.wait(_LAST_WORDS_SECONDS, [failure.label])
                self._say(
                    f"{failure.label}: {failure.ended.result().describe()}. "
                    f"{len(pending)} of {len(group.children)} still run, and have "
                    f"{grace_seconds:g} s to end by themselves."
                )
        return failure

    def _show_failure(self, child: Process) -> None:
        ending, count = child.ended.result(), len(self._workers.children)
        is_failure = ending.cause is not ExitCode.PREEMPTED
        who = f"{child.label} of {count}"
        if count > 1:
            who += " failed first" if is_failure else " ended first"
        tail = self._tails[child.label] if is_failure else ()
        self._say(describe_failure(who, ending, tail))

    async def _evaluate(self) -> ExitCode:
        """Runs the evaluator beside the workers, and again if it fails.

        It reads checkpoints and takes part in nothing else, so the workers go on when
        it fails, and it goes on when they are restarted.
        """
        policy = RestartPolicy(self._job.max_restarts, self._job.pause_seconds)
        cause = ExitCode.FAILED
        while not self._is_ending.is_set():
            self._say("starts the evaluator.")
            try:
                child = self._start(self._evaluator, None, policy.num_restarts)
            except OSError as error:
                self._say(f"cannot start the evaluator: {error}.")
                return ExitCode.FAILED
            await asyncio.wait([child.ended])
            await self._output.drain([EVALUATOR])
            ending = child.ended.result()
            cause = ending.cause
            if self._is_ending.is_set():
                break
            code = policy.find_exit_code(cause)
            rest = "" if self._has_trained else " The workers go on."
            if code is not ExitCode.OK:
                tail = self._tails[EVALUATOR]
                self._say(describe_failure(EVALUATOR, ending, tail))
            elif rest:
                self._say(f"evaluator: {ending.describe()}.{rest}")
            if code not in {ExitCode.OK, None}:
                self._say(f"the evaluator is not started again.{rest}")
            if code is not None:
                return code
            await self._pause(policy, " of the evaluator alone", rest)
        return cause

    async def _end_evaluation(
        self, evaluation: "asyncio.Task[ExitCode]", code: ExitCode
    ) -> ExitCode:
        """Waits for the evaluator; returns the exit code of the job.

        If the workers' `code` is good, it has all the time that it needs for the last
        checkpoint. Otherwise it is made to end.
        """
        if code is ExitCode.OK and self._stop is None:
            self._has_trained = True
            if not evaluation.done():
                self._say("all workers have ended; waits for the evaluator.")
            code = await evaluation
            return code if self._stop is None else find_stop_code(self._stop, [code])
        self._is_ending.set()
        if self._asked_at is None:
            self._asked_at = asyncio.get_running_loop().time()
            self._evaluator.send(signal.SIGTERM)
        self._evaluator.end_after((_TERMINATE_SECONDS, signal.SIGKILL))
        await evaluation
        return code

    async def _pause(
        self, policy: RestartPolicy, what: str = "", rest: str = ""
    ) -> None:
        """Waits before a restart, unless nothing is to be started any more."""
        seconds = policy.begin_restart()
        self._say(
            f"restart {policy.num_restarts} of {policy.max_restarts}{what} "
            f"in {seconds:g} s.{rest}"
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_ending.wait(), seconds)

    def _receive(self, number: int) -> None:
        """Passes a signal on; asks all processes to end if it is one of those."""
        workers, evaluator = self._workers, self._evaluator
        grace_seconds, now = self._job.grace_seconds, asyncio.get_running_loop().time()
        if number == signal.SIGCHLD:
            for child in (*workers.children, *evaluator.children):
                child.look()
        elif number not in _STOP_SIGNALS:
            evaluator.pass_on(number)
            workers.pass_on(number)
        elif self._asked_at is None:
            self._stop, self._asked_at = number, now
            self._is_ending.set()
            evaluator.pass_on(number)
            more = f"; SIGKILL in {grace_seconds:g} s, or after a second signal"
            workers.pass_on(number, more)
            # Beside workers, the evaluator has as long as they have.
            group = workers if workers.running else evaluator
            group.end_after((grace_seconds, signal.SIGKILL))
        # One request may arrive twice: `timeout` signals a process and its group.
        elif now > self._asked_at + _REPEAT_SECONDS:
            if workers.running:
                self._say(f"{name_signal(number)} again: ends all workers now.")
            workers.end_after((0.0, signal.SIGKILL))
            evaluator.end_after((0.0, signal.SIGKILL))
