"""Runs a job: attempt after attempt, until it has one exit code."""

import asyncio
import contextlib
import functools
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import Any

from armillary._checks import counted
from armillary._process import ExitCode
from armillary.launch._output import Output
from armillary.launch._process import (
    Ending,
    Machines,
    Process,
    make_environment,
    name_signal,
)
from armillary.launch._restarts import (
    Attempt,
    Restarts,
    find_first,
    find_stop_code,
    waits_in_vain,
)

EVALUATOR = "evaluator"
"""The label of the evaluator."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (*_STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
_CORE_SIGNALS = (signal.SIGQUIT, signal.SIGABRT)
_TERMINATE_SECONDS = 5.0
_JOIN_SECONDS = 0.5
_HEAR_SECONDS = 1.0
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
        # Ray prints pages about a lost machine; the supervisor writes one line.
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),
    ):
        return asyncio.run(_Supervisor(job, output).run())


class _Supervisor:
    """Shared state of a job's groups, and the signals that the launcher receives."""

    def __init__(self, job: Job, output: Output) -> None:
        self.job = job
        self.output = output
        self.say = output.say
        self.addresses: list[str] = []
        self.workers = _Group(self)
        self.evaluator = _Group(self, is_evaluator=True)
        self.evaluation: asyncio.Task[ExitCode] | None = None
        # The signal that stops the job, and the time when it was first passed on.
        self.stop: int | None = None
        self._asked_at: float | None = None
        # Set when no further process may be started.
        self.is_ending = asyncio.Event()

    async def run(self) -> ExitCode:
        """Returns the exit code of the job."""
        loop = asyncio.get_running_loop()
        # A signal that the launcher was started to ignore, as with `nohup`, stays
        # ignored. SIGCHLD is an exception: if it is ignored, the kernel does not keep
        # the exit codes of children.
        handled: list[int] = []
        for number in (*_PASSED_ON, *_CORE_SIGNALS):
            if signal.getsignal(number) != signal.SIG_IGN:
                handled.append(number)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in handled:
            loop.add_signal_handler(number, self._receive, number)
        try:
            code = await self.workers.run()
            if self.evaluation is not None:
                code = await self._end_evaluation(self.evaluation, code)
            count = self.workers.restarts.count
            if code is not ExitCode.OK or count:
                after = f" after {counted(count, 'restart')}" if count else ""
                self.say(f"ends with exit code {code.value} ({code.name}){after}.")
            return code
        finally:
            self.workers.kill()
            self.evaluator.kill()
            # From here on, a signal ends the launcher, even if its terminal is paused.
            for number in handled:
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
        self.evaluator.end_after(_TERMINATE_SECONDS)
        await evaluation
        return code

    def _receive(self, number: int) -> None:
        """Passes a signal on; a signal to stop also limits the time of processes."""
        workers = self.workers
        evaluator = self.evaluator
        grace_seconds = self.job.grace_seconds
        now = asyncio.get_running_loop().time()
        if number in _CORE_SIGNALS:
            # The kernel would end the workers, but not programs that they started.
            workers.kill()
            evaluator.kill()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number not in _STOP_SIGNALS:
            evaluator.pass_on(number)
            workers.pass_on(number)
        elif self._asked_at is None:
            self.stop = number
            self._asked_at = now
            self.is_ending.set()
            evaluator.pass_on(number)
            more = f"; SIGKILL in {grace_seconds:g} s, or after a second signal"
            workers.pass_on(number, more)
            # Next to running workers, the evaluator has as much time as they have.
            (workers if workers.running else evaluator).end_after(grace_seconds)
        # A request may arrive twice: `timeout` signals a process and its group.
        elif now > self._asked_at + _REPEAT_SECONDS:
            self.say(f"{name_signal(number)} again: ends all processes now.")
            workers.end_after(0.0)
            evaluator.end_after(0.0)


class _Group:
    """Processes that start and end together: the workers, or the evaluator alone."""

    def __init__(self, supervisor: _Supervisor, *, is_evaluator: bool = False) -> None:
        self._supervisor = supervisor
        self._job = supervisor.job
        self._say = supervisor.say
        self._output = supervisor.output
        self._is_evaluator = is_evaluator
        self.restarts = Restarts(
            self._job.max_restarts, self._job.pause_seconds, is_evaluator=is_evaluator
        )
        self.children: list[Process] = []
        # The workers that others have named as the cause of the end.
        self._named: set[int] = set()
        self._tails: dict[str, deque[str]] = {}
        # True if the running workers wait to join a worker that will never come.
        self._is_in_vain = False
        self._ender: asyncio.Task[None] | None = None

    async def run(self) -> ExitCode:
        """Runs the processes, and again if they fail; returns the last exit code."""
        is_ending = self._supervisor.is_ending
        alone = " of the evaluator alone" if self._is_evaluator else ""
        while True:
            attempt = await self._run_attempt()
            if is_ending.is_set():
                return attempt.cause
            code, what, why = self.restarts.judge(attempt)
            if code is not None:
                if why:
                    self._say(f"{why}.")
                if alone and code is not ExitCode.OK:
                    self._say(f"no restart{alone}: the workers go on.")
                return code
            seconds = self.restarts.pause_seconds
            reason = f": {why}" if why else ""
            self._say(f"{what}{alone} in {seconds:g} s{reason}.")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_ending.wait(), seconds)
            if is_ending.is_set():
                return find_stop_code(self._supervisor.stop or 0, [])

    @property
    def running(self) -> list[Process]:
        return [child for child in self.children if not child.ended.done()]

    def pass_on(self, number: int, note: str = "") -> None:
        """Sends a signal of the launcher to the running processes, and logs it."""
        if self.running:
            self._say(f"{name_signal(number)}: passed on to {self}{note}.")
        # A worker has no terminal, so a hang-up becomes SIGTERM.
        self.send(signal.SIGTERM if number == signal.SIGHUP else number)

    def send(self, number: int) -> None:
        for child in self.running:
            child.send_signal(number)

    def end_after(self, *pauses: float) -> None:
        """Ends the running processes after pauses in seconds, finally with SIGKILL."""
        if self._ender is not None:
            self._ender.cancel()
        self._ender = asyncio.create_task(self._end_in_turns(pauses))

    async def _end_in_turns(self, pauses: Sequence[float]) -> None:
        """Sends SIGTERM and SIGKILL, each after its pause, or only SIGKILL."""
        numbers = (signal.SIGTERM, signal.SIGKILL)[-len(pauses) :]
        for number, seconds in zip(numbers, pauses, strict=False):
            await asyncio.sleep(seconds)
            if self.running:
                self._say(f"{number.name}: sent to {self}, which still ran.")
            joins = any("joining" in child.told for child in self.children)
            for child in self.running:
                child.is_asked = True
                # A worker that never came to its strategy gets SIGABRT, so that it
                # prints the line at which it is stuck.
                is_lost = joins and not self._is_in_vain and not child.told
                shows_line = is_lost and number == signal.SIGTERM
                child.send_signal(signal.SIGABRT if shows_line else number)

    def kill(self) -> None:
        for child in self.children:
            child.kill()

    def __str__(self) -> str:
        if self._is_evaluator:
            return "the evaluator"
        numbers = [child.label.rpartition(" ")[2] for child in self.running]
        return f"worker {', '.join(numbers)}"

    async def _run_attempt(self) -> Attempt:
        """Runs all processes once; returns the outcome."""
        self.children = []
        self._named = set()
        self._is_in_vain = False
        try:
            await self._start()
            order = await self._wait()
        except OSError as error:
            self._say(f"cannot start a process: {error}.")
            failed = Ending(returncode=1, seconds=0.0)
            absence = ""
            if not self._is_evaluator:
                absence = self._job.machines.miss([len(self.children)])
            return Attempt(ExitCode.FAILED, failed, str(error), absence)
        finally:
            await self._clean_up()
        endings = {index: self.children[index].ended.result() for index in order}
        return self._find_outcome(endings)

    async def _clean_up(self) -> None:
        """Ends an attempt, and reads the last output and the last messages."""
        self.kill()
        self.end_after()
        await self._output.drain([child.label for child in self.children])
        silent = [child.silent for child in self.children]
        if silent:
            await asyncio.wait(silent, timeout=_HEAR_SECONDS)
        if not self._is_evaluator:
            self._job.machines.release()

    def _find_outcome(self, endings: Mapping[int, Ending]) -> Attempt:
        """Returns the outcome of an attempt, from the ends of processes in order."""
        supervisor = self._supervisor
        first = find_first(endings, self._named)
        is_over = self._is_evaluator and supervisor.is_ending.is_set()
        if first is not None and not is_over:
            self._show_failure(first)
        if supervisor.stop is not None:
            causes = [ending.cause for ending in endings.values()]
            return Attempt(find_stop_code(supervisor.stop, causes))
        if first is None:
            return Attempt(ExitCode.OK)

        ending = endings[first]
        absence = ""
        if self._is_in_vain:
            # The missing workers failed while the others waited for them.
            missing = [i for i in endings if not endings[i].is_asked]
            absence = self._job.machines.miss(missing)
        is_lost = ending.is_asked or ending.cause is ExitCode.OK
        cause = ExitCode.RESTART_REQUESTED if is_lost else ending.cause
        words, _, _ = self._find_words(self.children[first]).partition("\n")
        return Attempt(cause, ending, words, absence)

    def _find_words(self, child: Process) -> str:
        """Returns the error that a process reported, or its last line of output."""
        reported = child.told.get("failed")
        if reported:
            return str(reported)
        for line in reversed(self._tails[child.label]):
            if line.strip():
                return line.strip()
        return ""

    async def _start(self) -> None:
        supervisor = self._supervisor
        machines = self._job.machines
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
        machines = self._job.machines
        arguments = self._job.arguments
        environment = make_environment(
            os.environ,
            addresses=self._supervisor.addresses,
            index=index,
            devices=machines.devices,
            num_restarts=self.restarts.count,
            skipped=self.restarts.skipped,
        )
        child = machines.start(label, index, arguments, environment)
        self.children.append(child)
        self._tails[label] = self._output.add(label, child.stdout, child.stderr)
        child.listen(functools.partial(self._hear, child))

    def _hear(self, child: Process, word: str, *values: Any) -> None:
        """Handles a message of a process."""
        # A late message belongs to an earlier attempt.
        if child not in self.children:
            return
        sender = self.children.index(child)
        self.restarts.hear(word, *values)
        if word == "joined":
            self._job.machines.meet(sender)
        elif word == "caused_by" and values[0] != sender:
            self._named.add(values[0])
        elif word == "stopped" and not self._is_evaluator:
            self._end_stopped(values[0])
        self._give_up_join()

    def _end_stopped(self, index: int) -> None:
        """Immediately kills a worker that others report as stopped."""
        if not 0 <= index < len(self.children):
            return
        child = self.children[index]
        if child in self.running:
            self._say(f"SIGKILL: sent to {child.label}, which does not answer.")
            child.is_asked = True
            child.send_signal(signal.SIGKILL)

    def _give_up_join(self) -> None:
        """Ends the workers if they wait for a worker that will never join them."""
        is_known = self._is_in_vain or self._supervisor.stop is not None
        if not is_known and waits_in_vain(self.children):
            self._is_in_vain = True
            # The pause lets other workers fail by themselves, for the same reason.
            self.end_after(_JOIN_SECONDS, _JOIN_SECONDS)

    async def _wait(self) -> list[int]:
        """Waits until every process has ended; returns them in this order."""
        order: list[int] = []
        has_failed = False
        pending = {child.ended for child in self.children}
        while pending:
            done, pending = await asyncio.wait(
                pending, return_when=asyncio.FIRST_COMPLETED
            )
            ended = [i for i, child in enumerate(self.children) if child.ended in done]
            # Several may have ended together. One that only reacted comes after others.
            ended.sort(key=self._is_reaction)
            order += ended
            if self._supervisor.stop is not None or not pending:
                continue
            self._give_up_join()
            failed = [i for i in ended if self.children[i].ended.result().returncode]
            if failed and not has_failed:
                has_failed = True
                await self._limit_others(failed[0], len(pending))
        return order

    def _is_reaction(self, index: int) -> bool:
        return self.children[index].ended.result().is_reaction

    async def _limit_others(self, index: int, num_running: int) -> None:
        """Gives the others a limited time to end, after the first failure."""
        child = self.children[index]
        how = "wait in vain to join it"
        if not self._is_in_vain:
            grace_seconds = self._job.grace_seconds
            how = f"have {grace_seconds:g} s to end by themselves"
            self.end_after(grace_seconds, _TERMINATE_SECONDS)
        # The last output of the worker comes first.
        await self._output.drain([child.label], _LAST_WORDS_SECONDS)
        self._say(
            f"{child.label}: {child.ended.result()}. "
            f"{num_running} of {len(self.children)} still run, and {how}."
        )

    def _show_failure(self, index: int) -> None:
        """Writes the name of the process that failed, and the end of its stderr."""
        child = self.children[index]
        count = len(self.children)
        ending = child.ended.result()
        how = str(ending)
        if ending.is_asked:
            how = f"did not go on, and was ended: {ending}"
        elif ending.cause is ExitCode.OK:
            how = f"{ending}, while others needed it"

        who = child.label if self._is_evaluator else f"{child.label} of {count}"
        tail = list(self._tails[child.label])
        if ending.cause is ExitCode.PREEMPTED:
            who = f"{who} ended first"
            tail = []
        elif count > 1:
            who += " failed first"
        lines = [f"  | {line}" for line in tail if line.strip()]
        title = f"{who}: {how}."
        if lines:
            title += " Its stderr ended with:"
        self._say("\n".join([title, *lines]))
