"""Runs a job until it has one exit code, and receives the signals of the launcher."""

import asyncio
import contextlib
import os
import signal

from armillary._checks import counted
from armillary._process import ExitCode
from armillary.launch._group import TERMINATE_SECONDS, Group, Job, JobState
from armillary.launch._output import LabeledOutput
from armillary.launch._process import name_signal

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (*_STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
_CORE_SIGNALS = (signal.SIGQUIT, signal.SIGABRT)
_REPEAT_SECONDS = 1.0


def run_job(job: Job) -> ExitCode:
    """Runs a job to its end; no process of it is left after the return."""
    output = LabeledOutput(job.logs)
    with (
        contextlib.closing(job.machines),
        # Ray prints pages about a lost machine; the supervisor writes one line.
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),
    ):
        return asyncio.run(_Supervisor(job, output).run())


class _Supervisor:
    """The groups of a job, and the signals that the launcher receives."""

    def __init__(self, job: Job, output: LabeledOutput) -> None:
        self._job = job
        self._output = output
        self._write = output.write
        self._state = JobState(job, output)
        self._workers = Group(self._state, on_start=self._start_evaluation)
        self._evaluator = Group(self._state, is_evaluator=True)
        self._evaluation: asyncio.Task[ExitCode] | None = None
        # The time when a signal to stop was first passed on.
        self._asked_at: float | None = None

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
            code = await self._workers.run()
            if self._evaluation is not None:
                code = await self._end_evaluation(self._evaluation, code)
            count = self._workers.restarts.count
            if code is not ExitCode.OK or count:
                after = f" after {counted(count, 'restart')}" if count else ""
                self._write(f"ends with exit code {code.value} ({code.name}){after}.")
            return code
        finally:
            self._workers.kill()
            self._evaluator.kill()
            # From here on, a signal ends the launcher, even if its terminal is paused.
            for number in handled:
                loop.remove_signal_handler(number)
            await self._output.finish()

    def _start_evaluation(self) -> None:
        """Starts the evaluator next to the first workers."""
        if self._job.has_evaluator and self._evaluation is None:
            self._evaluation = asyncio.create_task(self._evaluator.run())

    async def _end_evaluation(
        self, evaluation: "asyncio.Task[ExitCode]", code: ExitCode
    ) -> ExitCode:
        """Waits for the evaluator; returns the exit code of the job."""
        if code is ExitCode.OK and self._state.stop is None:
            if not evaluation.done():
                self._write("all workers have ended; waits for the evaluator.")
            return await evaluation
        self._state.is_ending.set()
        if self._asked_at is None:
            self._asked_at = asyncio.get_running_loop().time()
            self._evaluator.send(signal.SIGTERM)
        self._evaluator.end_after(TERMINATE_SECONDS)
        await evaluation
        return code

    def _receive(self, number: int) -> None:
        """Passes a signal on; a signal to stop also limits the time of processes."""
        workers = self._workers
        evaluator = self._evaluator
        grace_seconds = self._job.grace_seconds
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
            self._state.stop = number
            self._asked_at = now
            self._state.is_ending.set()
            evaluator.pass_on(number)
            more = f"; SIGKILL in {grace_seconds:g} s, or after a second signal"
            workers.pass_on(number, more)
            # Next to running workers, the evaluator has as much time as they have.
            limited = workers if workers.running else evaluator
            limited.end_after(grace_seconds)
        # A request may arrive twice: `timeout` signals a process and its group.
        elif now > self._asked_at + _REPEAT_SECONDS:
            self._write(f"{name_signal(number)} again: ends all processes now.")
            workers.end_after(0.0)
            evaluator.end_after(0.0)
