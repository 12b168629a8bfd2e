"""Lets the processes of a job agree on values, without their devices.

Values are sent as text over the tree of the lifeline, in *rounds*. All processes take a
round at the same point of the program. A process that is at a different point, or has
failed, is named in an error.

Between two loops, one exchange serves everything that the processes must agree on (a
stop, a preemption, the next data). When one part asks, every part sends its value, and
each reads its answer later. Saves, and data within a loop, have separate rounds.

A thread in the background sends a *part* to process 0, outside of the rounds.
"""

import contextlib
import itertools
import json
import queue
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from armillary._launcher import notify_launcher
from armillary.errors import PeerError
from armillary.lifeline._lifeline import Lifeline, waiting
from armillary.lifeline._tree import Span

_SLICE_SECONDS = 1.0
_MAX_CHARACTERS = 1 << 22  # in one value
_VERDICT_SECONDS = 1.0
"""The longest time until the end of a process is known."""
_PART_SECONDS = 0.02
"""The time between two looks for parts."""


class Peers:
    """The processes that train together. This process has the number `index`."""

    # Only the main thread may use rounds, whose order must be the same everywhere. Any
    # thread may use parts.

    is_alone = False
    """True if there is only this process, so that nothing has to be agreed on."""

    def __init__(
        self, index: int, count: int, timeout_seconds: float, lifeline: Lifeline
    ) -> None:
        self.index = index
        self.count = count
        self._lifeline = lifeline
        self._timeout_seconds = timeout_seconds
        self.has_failed = False
        self.boundary = Boundary(self.gather)

    @property
    def host(self) -> str:
        """The address under which the other processes reach this one."""
        return self._lifeline.host

    def gather(self, topic: str, value: str) -> list[str]:
        """Returns the values of all processes, in their order."""
        if self.has_failed:
            raise PeerError(
                f"The processes cannot agree on {topic}, because the job has failed "
                "before. Start all processes again."
            )
        if len(value) > _MAX_CHARACTERS:
            raise ValueError(
                f"A process sends {len(value):,} characters for {topic}, but a message "
                f"between processes has at most {_MAX_CHARACTERS:,}. Send less."
            )
        with waiting():
            spans = self._exchange(topic, value)
        self._check_failures(spans)
        self._check_topics(spans)
        values: list[str] = []
        for start, stop, (_, _, text) in spans:
            values += [text] * (stop - start)
        return values

    def send_part(self, key: str, text: str) -> None:
        """Sends process 0 the text of this process, and does not wait."""
        self._lifeline.send_part(key, text)

    def receive_parts(self, key: str) -> list[str]:
        """Returns the texts of all other processes, in process 0.

        Raises:
            PeerError: If a process cannot send its text any more.
        """
        others = range(1, self.count)
        ended: int | None = None
        end = time.monotonic() + self._timeout_seconds
        try:
            while True:
                parts = self._lifeline.read_parts(key)
                missing = [index for index in others if index not in parts]
                if not missing:
                    return [parts[index] for index in others]
                # A process may have sent its text and ended since the last look.
                if ended is not None and ended in missing:
                    raise PeerError(
                        f"Process {ended} of {self.count} has reached the end of its "
                        "program without its part."
                    )
                ended = next(filter(self._lifeline.has_ended, missing), None)
                verdict = self._lifeline.wait_for_verdict(_PART_SECONDS)
                if verdict is not None:
                    raise PeerError(verdict)
                if time.monotonic() > end:
                    raise PeerError(
                        f"Process {missing[0]} of {self.count} has not sent its part "
                        f"for {self._timeout_seconds:g} seconds. Look at its output, "
                        "and at its file system."
                    )
        finally:
            self._lifeline.drop_parts(key)

    def _check_failures(self, spans: list[Span]) -> None:
        """Raises an error if a process has sent its failure in place of a value."""
        failures = {
            index: text for index, _, (kind, _, text) in spans if kind == "error"
        }
        if not failures:
            return
        notify_launcher("caused_by", min(failures))
        lines = "\n".join(
            f"  process {index} of {self.count}: {text}"
            for index, text in failures.items()
        )
        self._raise_failure(
            f"Another process has failed:\n{lines}\nFix this error, and start all "
            "processes again."
        )

    def _check_topics(self, spans: list[Span]) -> None:
        """Raises an error if the processes exchange values for different topics."""
        topics = {topic for _, _, (_, topic, _) in spans}
        if len(topics) <= 1:
            return
        lines: list[str] = []
        for start, stop, (_, topic, _) in spans:
            for index in range(start, stop):
                lines.append(f"  process {index} of {self.count}: {topic}")
        places = "\n".join(lines)
        self._raise_failure(
            f"The processes are at different points of the program:\n{places}\nAll "
            "must run the same program with the same arguments, and take the same "
            "decisions in it. Base decisions on values that all processes share."
        )

    def announce_failure(self, error: BaseException) -> None:
        """Tells the others, at their next round, that this process has failed."""
        if not self.has_failed:
            self.has_failed = True
            self._lifeline.report_failure(error)

    def explain(self, error: BaseException) -> PeerError | None:
        """Returns the error of the other process that has caused an error, if any."""
        if self.has_failed or isinstance(error, PeerError):
            return None
        cause = None
        if isinstance(error, Exception):  # Others, such as Ctrl-C, begin here.
            cause = self._find_cause(_VERDICT_SECONDS)
        # A process that ends on purpose announces it at the end of its program.
        if cause is None and not isinstance(error, SystemExit):
            self.announce_failure(error)
        return cause

    def announcing_errors(self) -> AbstractContextManager[None]:
        """Sends an error in the code inside it to the other processes."""
        return self._announcing_errors()

    @contextlib.contextmanager
    def _announcing_errors(self) -> Iterator[None]:
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            self.announce_failure(error)
            raise

    def _exchange(self, topic: str, value: str) -> list[Span]:
        """Returns the values of all processes, or raises if one does not answer."""
        self._lifeline.send_entry(["value", topic, value])
        # The others wait longer than process 0, whose error names the late process.
        limit_seconds = self._timeout_seconds * (1.1 if self.index else 1.0)
        end = time.monotonic() + limit_seconds
        ended = None
        while True:
            # The wait has slices, so that Ctrl-C takes effect between them.
            with contextlib.suppress(queue.Empty):
                return self._lifeline.answers.get(timeout=_SLICE_SECONDS)
            cause = self._find_cause(0.0)
            if cause is not None:
                raise cause
            # A process may have sent its value and ended since the last look, so one
            # that has ended counts only when it is missing twice.
            late = self._lifeline.find_missing() or [self.index]
            index = next(filter(self._lifeline.has_ended, late), late[0])
            who = f"Process {index} of {self.count}"
            while_waiting = f"while process {self.index} waits for it ({topic})"
            if index == ended:
                self._give_up(
                    f"{who} has reached the end of its program, {while_waiting}. All "
                    "processes must run the same steps, loops and saves."
                )
            ended = index if self._lifeline.has_ended(index) else None
            if time.monotonic() > end:
                self._give_up(
                    f"{who} has not answered for {self._timeout_seconds:g} seconds, "
                    f"{while_waiting}. Look at its output, or allow more time with "
                    "`CommunicationOptions(timeout_seconds=...)`."
                )

    def _find_cause(self, timeout_seconds: float) -> PeerError | None:
        verdict = self._lifeline.wait_for_verdict(timeout_seconds)
        if verdict is None:
            return None
        self.has_failed = True
        return PeerError(verdict)

    def _give_up(self, message: str) -> NoReturn:
        if not self.index:
            self._lifeline.refuse(0, f"{PeerError.__name__}: {message}")
        self._raise_failure(message)

    def _raise_failure(self, message: str) -> NoReturn:
        self.has_failed = True
        raise PeerError(message)


class Alone(Peers):
    """The only process of its job. It agrees with itself, and sends nothing."""

    is_alone = True

    def __init__(self) -> None:
        self.index = 0
        self.count = 1
        self.has_failed = False
        self.boundary = Boundary(self.gather)

    def gather(self, topic: str, value: str) -> list[str]:
        del topic
        return [value]

    def send_part(self, key: str, text: str) -> None:
        del key, text

    def receive_parts(self, key: str) -> list[str]:
        del key
        return []

    def announce_failure(self, error: BaseException) -> None:
        del error

    def explain(self, error: BaseException) -> None:
        del error

    def announcing_errors(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __reduce__(self) -> str:
        return "ALONE"  # A copy is the same object.


class Boundary:
    """The last exchange between two loops; all processes call the same methods."""

    def __init__(self, gather: Callable[[str, str], list[str]]) -> None:
        self._gather = gather
        # Parts are numbered by first use, which has the same order in all processes.
        self._counter = itertools.count()
        self._parts: dict[weakref.WeakMethod[Callable[[], Any]], str] = {}
        self._values: list[dict[str, Any]] = []
        self.num_expired = 0

    def exchange(self, topic: str, part: Callable[[], Any]) -> list[Any]:
        """Exchanges the values of all parts; returns each process's value of `part`."""
        asked = self._number(part)
        own: dict[str, Any] = {}
        for reference, number in list(self._parts.items()):
            each = reference()
            if each is None:
                del self._parts[reference]
            else:
                own[number] = each()
        texts = self._gather(topic, json.dumps(own))
        # Most texts are equal, so each is parsed once.
        known = {text: json.loads(text) for text in set(texts)}
        self._values = [dict(known[text]) for text in texts]
        return [values.pop(asked) for values in self._values]

    def take(self, part: Callable[[], Any]) -> list[Any] | None:
        """Returns, once, each process's value of `part` from the last exchange."""
        number = self._number(part)
        found = [values.pop(number, None) for values in self._values]
        if not found or None in found:
            return None
        return found

    def expire(self) -> None:
        """Forgets the last exchange, because something has run since."""
        self._values = []
        self.num_expired += 1

    def _number(self, part: Callable[[], Any]) -> str:
        reference = weakref.WeakMethod(part)
        if reference not in self._parts:
            self._parts[reference] = str(next(self._counter))
        return self._parts[reference]


ALONE = Alone()
