"""How the processes of a job agree on something, without their devices.

Values are sent as text over the tree of the lifeline, in *rounds*. All processes take a
round at the same point of the program. A process that is at a different point, or has
failed, is named in an error.

Between two loops, one exchange serves everything that the processes must agree on (a
stop, a preemption, the next data). When one part asks, every part sends its value, and
each reads its answer later. Saves, and data within a loop, have separate rounds.
"""

import contextlib
import itertools
import json
import queue
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from armillary.errors import PeerError
from armillary.lifeline._lifeline import Lifeline, waiting
from armillary.lifeline._tree import Run

_SLICE_SECONDS = 1.0
_MOST_CHARACTERS = 1 << 22  # Of one value.
_VERDICT_SECONDS = 1.0
"""How long it takes at most until the end of a process is known."""


class Peers:
    """The processes that train together, of which this is number `index`."""

    # Only the main thread may use it: rounds must follow each other in one order.

    def __init__(
        self, index: int, count: int, timeout_seconds: float, lifeline: Lifeline
    ) -> None:
        self.index, self.count = index, count
        self._lifeline, self._timeout_seconds = lifeline, timeout_seconds
        self.has_failed = False
        self.boundary = Boundary(self.gather)

    def gather(self, topic: str, value: str) -> list[str]:
        """Returns the values of all processes, in their order."""
        if self.has_failed:
            raise PeerError(
                f"`{topic}` cannot be agreed on, because the job has failed before. "
                "Start all processes again."
            )
        if len(value) > _MOST_CHARACTERS:
            raise ValueError(
                f"`{topic}` takes {len(value):,} characters, but a message between "
                f"processes has at most {_MOST_CHARACTERS:,}. Send less."
            )
        with waiting():
            runs = self._exchange(topic, value)
        failures = [
            f"  process {index} of {self.count}: {text}"
            for index, _, (kind, _, text) in runs
            if kind == "error"
        ]
        if failures:
            self._fail(
                "Another process has failed:\n" + "\n".join(failures) + "\nFix this "
                "error, and start all processes again."
            )
        if len({topic for _, _, (_, topic, _) in runs}) > 1:
            places = "\n".join(
                f"  process {index} of {self.count}: {topic}"
                for start, stop, (_, topic, _) in runs
                for index in range(start, stop)
            )
            self._fail(
                f"The processes are at different points of the program:\n{places}\nAll "
                "must run the same program with the same arguments, and take the same "
                "decisions in it. Take them from values that all processes share."
            )
        return [text for start, stop, (*_, text) in runs for _ in range(start, stop)]

    def fail(self, error: BaseException) -> None:
        """Tells the others, at their next round, that this process has failed."""
        if not self.has_failed:
            self.has_failed = True
            self._lifeline.tell_failure(error)

    def explain(self, error: BaseException) -> PeerError | None:
        """Returns what has caused an error, if that is another process."""
        if self.has_failed or isinstance(error, PeerError):
            return None
        is_own = not isinstance(error, Exception)
        cause = None if is_own else self._find_cause(_VERDICT_SECONDS)
        # A process that ends by choice says so at the end of its program.
        if cause is None and not isinstance(error, SystemExit):
            self.fail(error)
        return cause

    @contextlib.contextmanager
    def announcing_errors(self) -> Iterator[None]:
        """Tells the others of an error in the code under it."""
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            self.fail(error)
            raise

    def _exchange(self, topic: str, value: str) -> list[Run]:
        """Returns what all processes say, or raises what keeps them from that."""
        self._lifeline.say(["value", topic, value])
        # The others wait longer than the chief, which names the late.
        limit = self._timeout_seconds * (1.1 if self.index else 1.0)
        end, ended = time.monotonic() + limit, None
        while True:
            # In slices, so that Ctrl-C is heard between them.
            with contextlib.suppress(queue.Empty):
                return self._lifeline.answers.get(timeout=_SLICE_SECONDS)
            cause = self._find_cause(0.0)
            if cause is not None:
                raise cause
            # What one said before its end may have come after the last look.
            late = self._lifeline.find_missing() or [self.index]
            index = next(filter(self._lifeline.has_ended, late), late[0])
            who = f"Process {index} of {self.count}"
            waiting = f"while process {self.index} waits for it ({topic})"
            if index == ended:
                self._give_up(
                    f"{who} has reached the end of its program, {waiting}. All "
                    "processes must run the same steps, loops and saves."
                )
            ended = index if self._lifeline.has_ended(index) else None
            if time.monotonic() > end:
                self._give_up(
                    f"{who} has not answered for {self._timeout_seconds:g} seconds, "
                    f"{waiting}. Look at its output, or allow more time with "
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
        self._fail(message)

    def _fail(self, message: str) -> NoReturn:
        self.has_failed = True
        raise PeerError(message)


class Boundary:
    """The last exchange between two loops. All processes call the same methods."""

    def __init__(self, gather: Callable[[str, str], list[str]]) -> None:
        self._gather = gather
        # Numbered by first use, which is at the same point in all processes.
        self._counter = itertools.count()
        self._parts: dict[weakref.WeakMethod[Callable[[], Any]], str] = {}
        self._said: list[dict[str, Any]] = []
        self.num_expired = 0

    def exchange(self, topic: str, say: Callable[[], Any]) -> list[Any]:
        """Lets all parts speak; returns what each process says by `say`."""
        asked, own = self._number(say), {}
        for reference, number in list(self._parts.items()):
            if (speaker := reference()) is None:
                del self._parts[reference]
            else:
                own[number] = speaker()
        texts = self._gather(topic, json.dumps(own))
        # Most say the same.
        known = {text: json.loads(text) for text in set(texts)}
        self._said = [dict(known[text]) for text in texts]
        return [said.pop(asked) for said in self._said]

    def take(self, say: Callable[[], Any]) -> list[Any] | None:
        """Returns, once, what each process said by `say` in the last exchange."""
        number = self._number(say)
        found = [said.pop(number, None) for said in self._said]
        return None if not found or None in found else found

    def expire(self) -> None:
        """Forgets what was said, because something has run since."""
        self._said = []
        self.num_expired += 1

    def _number(self, say: Callable[[], Any]) -> str:
        reference = weakref.WeakMethod(say)
        if reference not in self._parts:
            self._parts[reference] = str(next(self._counter))
        return self._parts[reference]
