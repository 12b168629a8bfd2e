"""The processes of a job that start and end together, attempt after attempt."""

import asyncio
import contextlib
import functools
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import Any

from armillary._checks import counted
from armillary._process import ExitCode
from armillary.launch._environment import make_environment
from armillary.launch._machines import Machines
from armillary.launch._output import LabeledOutput
from armillary.launch._process import Ending, LaunchedProcess, name_signal
from armillary.launch._restarts import (
    Attempt,
    Restarts,
    find_first,
    find_stop_code,
    waits_in_vain,
)

EVALUATOR = "evaluator"
"""The label of the evaluator."""
TERMINATE_SECONDS = 5.0
"""The time from SIGTERM to SIGKILL."""

_JOIN_SECONDS = 0.5
_HEAR_SECONDS = 1.0
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


class JobState:
    """The state of a job that its groups share."""

    def __init__(self, job: Job, output: LabeledOutput) -> None:
        self.job = job
        self.output = output
        self.addresses: list[str] = []
        # The signal that stops the job.
        self.stop: int | None = None
        # Set when no further process may be started.
        self.is_ending = asyncio.Event()


class Group:
    """Processes that start and end together: the workers, or the evaluator alone."""

    def __init__(
        self,
        state: JobState,
        *,
        is_evaluator: bool = False,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self._state = state
        self._job = state.job
        self._write = state.output.write
        self._output = state.output
        self._is_evaluator = is_evaluator
        self._on_start = on_start
        self.restarts = Restarts(
            self._job.max_restarts, self._job.pause_seconds, is_evaluator=is_evaluator
        )
        self.children: list[LaunchedProcess] = []
        # The workers that others have named as the cause of the end.
        self._named: set[int] = set()
        self._tails: dict[str, deque[str]] = {}
        # True if the running workers wait to join a worker that will never come.
        self._is_in_vain = False
        self._ender: asyncio.Task[None] | None = None

    async def run(self) -> ExitCode:
        """Runs the processes, and again if they fail; returns the last exit code."""
        is_ending = self._state.is_ending
        alone = " of the evaluator alone" if self._is_evaluator else ""
        while True:
            attempt = await self._run_attempt()
            if is_ending.is_set():
                return attempt.cause
            code, what, why = self.restarts.judge(attempt)
            if code is not None:
                if why:
                    self._write(f"{why}.")
                if alone and code is not ExitCode.OK:
                    self._write(f"no restart{alone}: the workers go on.")
                return code

            seconds = self.restarts.pause_seconds
            reason = f": {why}" if why else ""
            self._write(f"{what}{alone} in {seconds:g} s{reason}.")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_ending.wait(), seconds)
            if is_ending.is_set():
                return find_stop_code(self._state.stop or 0, [])

    @property
    def running(self) -> list[LaunchedProcess]:
        return [child for child in self.children if not child.ended.done()]

    def pass_on(self, number: int, note: str = "") -> None:
        """Sends a signal of the launcher to the running processes, and logs it."""
        if self.running:
            self._write(f"{name_signal(number)}: passed on to {self}{note}.")
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
                self._write(f"{number.name}: sent to {self}, which still ran.")
            joins = any("joining" in child.told for child in self.children)
            for child in self.running:
                child.is_asked = True
                # A worker that never came to its strategy gets SIGABRT, so that it
                # prints the line at which it is stuck.
                is_expected = joins and not self._is_in_vain
                is_lost = is_expected and not child.told
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
            self._write(f"cannot start a process: {error}.")
            failed = Ending(returncode=1, seconds=0.0)
            absence = ""
            if not self._is_evaluator:
                absence = self._job.machines.note_missing([len(self.children)])
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
        state = self._state
        first = find_first(endings, self._named)
        is_over = self._is_evaluator and state.is_ending.is_set()
        if first is not None and not is_over:
            self._show_failure(first)
        if state.stop is not None:
            causes = [ending.cause for ending in endings.values()]
            return Attempt(find_stop_code(state.stop, causes))
        if first is None:
            return Attempt(ExitCode.OK)

        ending = endings[first]
        absence = ""
        if self._is_in_vain:
            # The missing workers failed while the others waited for them.
            missing = [i for i in endings if not endings[i].is_asked]
            absence = self._job.machines.note_missing(missing)
        is_lost = ending.is_asked or ending.cause is ExitCode.OK
        cause = ExitCode.RESTART_REQUESTED if is_lost else ending.cause
        words, _, _ = self._find_words(self.children[first]).partition("\n")
        return Attempt(cause, ending, words, absence)

    def _find_words(self, child: LaunchedProcess) -> str:
        """Returns the error that a process reported, or its last line of output."""
        reported = child.told.get("failed")
        if reported:
            return str(reported)
        for line in reversed(self._tails[child.label]):
            if line.strip():
                return line.strip()
        return ""

    async def _start(self) -> None:
        """Reserves the machines, and starts the processes on them."""
        state = self._state
        machines = self._job.machines
        if state.is_ending.is_set():
            return
        if self._is_evaluator:
            self._write("starts the evaluator.")
            self._start_process(EVALUATOR, None)
            return

        # Machines may not be free for long, and a signal must end the wait for them.
        reserving = asyncio.create_task(machines.reserve(self._write))
        ending = asyncio.create_task(state.is_ending.wait())
        await asyncio.wait({reserving, ending}, return_when=asyncio.FIRST_COMPLETED)
        if state.is_ending.is_set():
            reserving.cancel()
            return
        ending.cancel()
        addresses, where = reserving.result()
        state.addresses = addresses

        self._write(
            f"starts {counted(len(addresses), 'worker')}{where}, "
            f"coordinator {addresses[0]}, {machines.devices}."
        )
        for index in range(len(addresses)):
            self._start_process(f"worker {index}", index)
        if self._on_start is not None:
            self._on_start()

    def _start_process(self, label: str, index: int | None) -> None:
        """Starts a worker, or the evaluator (index `None`)."""
        machines = self._job.machines
        arguments = self._job.arguments
        environment = make_environment(
            os.environ,
            addresses=self._state.addresses,
            index=index,
            devices=machines.devices,
            num_restarts=self.restarts.count,
            skipped=self.restarts.skipped,
        )
        child = machines.start(label, index, arguments, environment)
        self.children.append(child)
        self._tails[label] = self._output.add(label, child.stdout, child.stderr)
        child.listen(functools.partial(self._receive, child))

    def _receive(self, child: LaunchedProcess, word: str, *values: Any) -> None:
        """Handles a message of a process."""
        # A late message belongs to an earlier attempt.
        if child not in self.children:
            return
        sender = self.children.index(child)
        self.restarts.receive(word, *values)
        if word == "joined":
            self._job.machines.note_present(sender)
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
            self._write(f"SIGKILL: sent to {child.label}, which does not answer.")
            child.is_asked = True
            child.send_signal(signal.SIGKILL)

    def _give_up_join(self) -> None:
        """Ends the workers if they wait for a worker that will never join them."""
        is_known = self._is_in_vain or self._state.stop is not None
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
            if self._state.stop is not None or not pending:
                continue

            self._give_up_join()
            failed = [i for i in ended if self._has_failed(i)]
            if failed and not has_failed:
                has_failed = True
                await self._limit_others(failed[0], len(pending))
        return order

    def _has_failed(self, index: int) -> bool:
        return self.children[index].ended.result().returncode != 0

    def _is_reaction(self, index: int) -> bool:
        return self.children[index].ended.result().is_reaction

    async def _limit_others(self, index: int, num_running: int) -> None:
        """Gives the others a limited time to end, after the first failure."""
        child = self.children[index]
        # The last output of the worker comes first. Meanwhile, messages arrive that
        # others sent before it ended, such as that they wait to join it.
        await self._output.drain([child.label], _LAST_WORDS_SECONDS)
        how = "wait in vain to join it"
        if not self._is_in_vain:
            grace_seconds = self._job.grace_seconds
            how = f"have {grace_seconds:g} s to end by themselves"
            self.end_after(grace_seconds, TERMINATE_SECONDS)
        self._write(
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
        self._write("\n".join([title, *lines]))
