"""Runs a job: attempt after attempt, until it has one exit code."""

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from armillary._exit_code import ExitCode
from armillary.launch._attempt import Attempt, Result
from armillary.launch._devices import DevicePlan
from armillary.launch._ending import describe_failure
from armillary.launch._environment import make_environment
from armillary.launch._evaluator import LABEL, Evaluator
from armillary.launch._output import Output
from armillary.launch._ports import find_addresses
from armillary.launch._restart_policy import RestartPolicy
from armillary.launch._signals import STOP_SIGNALS, SignalInbox
from armillary.launch._sink import LogFile
from armillary.launch._stop import find_stop_code
from armillary.launch._worker import Worker


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run, and how; all of it is checked already.

    Args:
        arguments: What follows `python` on the command line of each process.
        num_workers: Number of workers.
        has_evaluator: Whether an evaluator runs beside them.
        devices: The devices of each process.
        max_restarts: Restarts allowed, of the workers, and of the evaluator alone.
        restart_pause: Seconds before the first restart.
        grace_period: Seconds that workers get to end by themselves.
        logs: A log file for each process by its label, or none at all. They are closed
            at the end.
    """

    arguments: Sequence[str]
    num_workers: int
    has_evaluator: bool = False
    devices: DevicePlan
    max_restarts: int
    restart_pause: float
    grace_period: float
    logs: Mapping[str, LogFile]


def run_job(job: Job) -> ExitCode:
    """Runs a job to its end; no process of it is left after the return.

    It must be called in the main thread, where signals arrive.
    """
    with Output(job.logs) as output, SignalInbox() as inbox:
        return _Supervisor(job, output, inbox).run()


class _Supervisor:
    def __init__(self, job: Job, output: Output, inbox: SignalInbox) -> None:
        self._job = job
        self._output = output
        self._policy = RestartPolicy(job.max_restarts, job.restart_pause)
        self._tails: dict[str, deque[str]] = {}
        self._addresses: list[str] = []
        self._evaluator: Evaluator | None = None
        self._wait = inbox.wait
        if job.has_evaluator:
            self._evaluator = Evaluator(
                self._start_evaluator,
                inbox,
                output,
                policy=RestartPolicy(job.max_restarts, job.restart_pause),
                grace_period=job.grace_period,
            )
            self._wait = self._evaluator.wait

    def run(self) -> ExitCode:
        """Returns the exit code of the job."""
        try:
            return self._run()
        finally:
            if self._evaluator is not None:
                self._evaluator.close()

    def _run(self) -> ExitCode:
        while True:
            result = self._run_attempt()
            self._show_failure(result)
            code = result.cause
            if not result.is_stopped:
                found = self._policy.find_exit_code(result.cause)
                code = self._pause() if found is None else found
            if code is None:
                continue
            if self._evaluator is not None:
                if code is ExitCode.OK and not result.is_stopped:
                    code = self._evaluator.finish()
                else:
                    self._evaluator.end()
            if code is not ExitCode.OK or self._policy.num_restarts:
                self._output.say(self._describe_end(code))
            return code

    def _run_attempt(self) -> Result:
        workers: list[Worker] = []
        try:
            try:
                self._start(workers)
            except OSError as error:
                self._output.say(f"cannot start worker {len(workers)}: {error}.")
                return Result(cause=ExitCode.FAILED)
            return Attempt(
                workers,
                self._wait,
                grace_period=self._job.grace_period,
                say=self._output.say,
            ).run()
        finally:
            for worker in workers:
                worker.kill()
            self._output.drain(labels=[worker.label for worker in workers])

    def _start(self, workers: list[Worker]) -> None:
        """Appends every worker as it starts, so that none is lost if the next fails."""
        job = self._job
        self._addresses = find_addresses(job.num_workers)
        self._output.say(
            f"starts {job.num_workers} worker{'s' if job.num_workers > 1 else ''}, "
            f"coordinator {self._addresses[0]}, {job.devices.describe()}."
        )
        for index in range(job.num_workers):
            label = f"worker {index}"
            environment = self._make_environment(index, self._policy.num_restarts)
            worker = Worker(label, job.arguments, environment)
            workers.append(worker)
            self._tails[label] = self._output.add(label, worker.stdout, worker.stderr)

    def _start_evaluator(
        self, num_restarts: int, variables: Mapping[str, str], descriptor: int
    ) -> Worker:
        environment = self._make_environment(None, num_restarts)
        return Worker(
            LABEL,
            self._job.arguments,
            {**environment, **variables},
            pass_fds=[descriptor],
        )

    def _make_environment(self, index: int | None, num_restarts: int) -> dict[str, str]:
        return make_environment(
            os.environ,
            addresses=self._addresses,
            index=index,
            devices=self._job.devices,
            num_restarts=num_restarts,
        )

    def _pause(self) -> ExitCode | None:
        """Waits before a restart; returns an exit code if a signal came instead."""
        seconds = self._policy.begin_restart()
        self._output.say(
            f"restart {self._policy.num_restarts} of {self._policy.max_restarts} "
            f"in {seconds:g} s."
        )
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            for number in self._wait(remaining):
                if number in STOP_SIGNALS:
                    return find_stop_code(number, [])
        return None

    def _show_failure(self, result: Result) -> None:
        failure = result.failure
        if failure is None:
            return
        who = f"{failure.label} of {self._job.num_workers}"
        is_failure = failure.cause is not ExitCode.PREEMPTED
        if self._job.num_workers > 1:
            who += " failed first" if is_failure else " ended first"
        tail = self._tails[failure.label] if is_failure else ()
        self._output.say(describe_failure(who, failure, tail))

    def _describe_end(self, code: ExitCode) -> str:
        count = self._policy.num_restarts
        after = f" after {count} restart{'s' if count > 1 else ''}" if count else ""
        return f"ends with exit code {code.value} ({code.name}){after}."
