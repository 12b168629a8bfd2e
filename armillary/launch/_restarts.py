"""The cause of an attempt's end, and the decision to restart: functions and counts.

Progress is a newer checkpoint on the disk. For the evaluator, it is a newer checkpoint
that it has evaluated or begun to evaluate.
"""

import re
import signal
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from armillary._process import ExitCode
from armillary.launch._process import Ending, LaunchedProcess

MAX_PAUSE_SECONDS = 60.0
MAX_ALIKE = 3
"""The number of equal failures without progress after which there is no restart."""
_MAX_CRASHES = 2
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Attempt(NamedTuple):
    """The outcome of an attempt."""

    cause: ExitCode  # The meaning of its end for the job.
    # The process that failed first, and the last line that it wrote.
    ending: Ending = Ending(returncode=0, seconds=0.0)
    words: str = ""
    absence: str = ""  # The message about workers that did not come, if not a failure.


def find_first(endings: Mapping[int, Ending], named: Collection[int]) -> int | None:
    """Returns the index of the worker that failed first.

    Args:
        endings: The ends of the workers, in their order.
        named: The workers that others name as the cause of the end.
    """
    asked = [i for i, ending in endings.items() if ending.is_asked]
    alone = [i for i in endings if i not in asked]
    failed = [i for i in alone if endings[i].returncode != 0]
    if not failed and not asked:
        return None

    own = [i for i in failed if not endings[i].is_reaction]
    # Two workers that lose their connection name each other. So a worker that ended
    # because of another one is not the cause, even if it is named.
    blamed: list[int] = []
    for index in endings:
        is_reaction = index in failed and index not in own
        if index in named and not is_reaction:
            blamed.append(index)

    # The first end counts, whatever it was, if nobody failed for a reason of its own:
    # a worker that has saved, or one that ended with 0 while others needed it.
    saved = [i for i in failed[:1] if endings[i].cause is ExitCode.PREEMPTED]
    early = [i for i in alone[:1] if endings[i].returncode == 0]
    by_likelihood = [*blamed, *own, *saved, *early, *asked, *failed]
    return by_likelihood[0]


def find_stop_code(number: int, causes: Sequence[ExitCode]) -> ExitCode:
    """Returns the exit code of a job that a signal stopped."""
    if causes and set(causes) <= {ExitCode.OK, ExitCode.PREEMPTED}:
        return max(causes)
    return ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED


class Restarts:
    """The restarts of the workers, or of the evaluator alone."""

    def __init__(
        self, most: int, first_seconds: float, *, is_evaluator: bool = False
    ) -> None:
        self.count = 0
        self.skipped = ""  # The checkpoint that the next attempt skips.
        self._most = most
        self._first_seconds = first_seconds
        self._is_evaluator = is_evaluator
        self._highest = -1
        self._evaluated = set[str]()
        # The checkpoint that the attempt restored, until its first loop has ended.
        self._restored = ""
        self._forget()

    def _forget(self) -> None:
        """Starts the counts since the last progress again."""
        self._attempts = 0
        self._failures = 0
        self._alike = 0
        self._last: tuple[int, str] | None = None
        self._crashes: Counter[str] = Counter()
        self._has_skipped = False

    @property
    def pause_seconds(self) -> float:
        """The seconds before the next restart: they double, up to a bound."""
        # The bound of the exponent keeps the power a number that a float can hold.
        num_doublings = min(max(0, self._attempts - 1), 30)
        seconds = self._first_seconds * 2**num_doublings
        longest = max(MAX_PAUSE_SECONDS, self._first_seconds)
        return min(seconds, longest)

    def receive(self, word: str, *values: Any) -> None:
        """Handles a message of a process."""
        if word == "saved":
            number = values[0]
            self.skipped = ""
            if number > self._highest:
                self._highest = number
                self._forget()
        elif word == "restored":
            self._restored = values[0]
        elif word == "evaluating":
            path = values[0]
            if self._is_evaluator and path not in self._evaluated:
                self._evaluated.add(path)
                self._forget()
        elif word == "trained":
            self._restored = ""

    def judge(self, attempt: Attempt) -> tuple[ExitCode | None, str, str]:
        """Returns the exit code or `None` for a restart, the action, and the reason."""
        cause = attempt.cause
        restored = self._restored
        self._restored = ""
        # A wrong command line is also wrong in the next attempt.
        if cause in {ExitCode.OK, ExitCode.USAGE} or not self._most:
            return cause, "", ""

        self._attempts += 1
        was_lost = bool(attempt.absence or attempt.ending.loss)
        is_of_machines = was_lost or cause is ExitCode.PREEMPTED
        if is_of_machines:
            self.count += 1
            return None, "restart", attempt.absence or "a machine was taken away"

        self._failures += 1
        self._note_failure(attempt, restored)
        is_bad = self._crashes[restored] >= _MAX_CRASHES and not self._has_skipped
        is_repeated = self._alike >= MAX_ALIKE
        # An attempt without the bad checkpoint may end differently.
        is_hopeless = is_repeated and not is_bad
        if is_hopeless or self._failures > self._most:
            return ExitCode.TOO_MANY_RESTARTS, "", self._explain_end(attempt.words)

        self.count += 1
        why = ""
        if is_bad:
            self._has_skipped = True
            self.skipped = restored
            why = f"the first steps after `{restored}` failed twice: without it"
        return None, f"restart {self._failures} of {self._most}", why

    def _note_failure(self, attempt: Attempt, restored: str) -> None:
        """Counts a failure, and a crash after the checkpoint that it restored."""
        returncode = attempt.ending.returncode
        # A kill from outside need not come again, however often it came.
        is_own = -returncode not in _FROM_OUTSIDE
        self._count_alike(returncode, attempt.words, is_own=is_own)
        is_after_restore = restored != "" and not self._is_evaluator
        if is_own and is_after_restore:
            self._crashes[restored] += 1

    def _explain_end(self, words: str) -> str:
        """Returns the reason why there is no further restart."""
        why = f"the last of {self._failures} failures"
        if self._alike >= MAX_ALIKE:
            why = f"the same failure {self._alike} times"
        error = f": {words.rstrip('.')}" if words else ""
        return f"{why} without a newer checkpoint{error}"

    def _count_alike(self, returncode: int, words: str, *, is_own: bool) -> None:
        """Counts equal failures in a row; numbers in the error may differ."""
        failure = (returncode, _NUMBERS.sub("#", words))
        is_repeated = is_own and failure == self._last
        self._alike = self._alike + 1 if is_repeated else 1
        self._last = failure


def waits_in_vain(children: Sequence[LaunchedProcess]) -> bool:
    """Returns whether running workers wait, or will wait, for one that has ended."""
    ended = [child for child in children if child.ended.done()]
    running = [child for child in children if child not in ended]
    if not (running and ended):
        return False
    if all(child.is_joining for child in running):
        return True
    if any("joined" in child.told for child in children):
        return False
    # A worker failed before it came, although the processes of its program join.
    joins = any("joining" in child.told for child in children)
    failed = [child for child in ended if child.ended.result().returncode]
    return joins and any("joining" not in child.told for child in failed)
