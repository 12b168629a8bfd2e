"""How the processes of a job agree on something, without their devices.

Values travel as text through the key-value store of JAX's coordination service, in
*rounds* that all processes take at the same points of the program. Whoever is at
another point, or has failed, is named, where a collective operation would wait.

Between two loops one exchange serves all that must hear of the others (a stop, a
preemption, the next data): all of them say something when one asks, and find their
answers when they look, until the next loop, evaluation or action. Saves, and data taken
within a loop, have rounds of their own: waiting for them would put off a stop.
"""

import contextlib
import itertools
import json
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax

from armillary.errors import PeerError
from armillary.lifeline._lifeline import Lifeline

_SLICE_SECONDS = 1.0
_ROUNDS_PER_FOLDER = 64
"""How many rounds are deleted at once: each request to the service takes its time."""
_VERDICT_SECONDS = 1.0
"""How long it takes at most until the end of a process is known."""


class Peers:
    """The processes that train together, of which this is number `index`."""

    # Only the main thread may use it: rounds must follow each other in one order.

    def __init__(
        self,
        store: Any,
        index: int,
        count: int,
        timeout_seconds: float,
        lifeline: Lifeline | None = None,
    ) -> None:
        self.index, self.count = index, count
        self._lifeline = lifeline or Lifeline(index, count)
        self._store = store  # JAX's client of it.
        self._timeout_seconds = timeout_seconds
        self._round = 0
        self.has_failed = False
        self.boundary = Boundary(self.gather)

    def gather(self, topic: str, value: str) -> list[str]:
        """Returns the values of all processes, in their order."""
        if self.has_failed:
            raise PeerError(
                f"`{topic}` cannot be agreed on, because the job has failed before. "
                "Start all processes again."
            )
        entries = self._exchange(["value", topic, value])
        names = [f"  process {index} of {self.count}: " for index in range(self.count)]
        failures = [
            name + text
            for name, (kind, _, text) in zip(names, entries, strict=True)
            if kind == "error"
        ]
        if failures:
            self._fail(
                "Another process has failed:\n" + "\n".join(failures) + "\nRepair what "
                "it says, and start all processes again."
            )
        topics = [topic for _, topic, _ in entries]
        if len(set(topics)) > 1:
            places = "\n".join(map("".join, zip(names, topics, strict=True)))
            self._fail(
                f"The processes are at different points of the program:\n{places}\nAll "
                "must run the same program with the same arguments, and take the same "
                "decisions in it. Take them from values that all processes share."
            )
        return [text for _, _, text in entries]

    def fail(self, error: BaseException) -> None:
        """Tells the others, at their next round, that this process has failed."""
        if not self.has_failed:
            self.has_failed = True
            self._lifeline.tell_failure(error)
            self._tell(error)

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

    def _exchange(self, entry: list[str]) -> list[list[str]]:
        """Returns the entries of all processes: the chief collects and publishes."""
        # ORDER: a round is over for a process once it has said its part. If it is
        # interrupted before, its failure is that part, and nobody waits for it.
        number = self._round
        if self.index:
            self._set(str(self.index), entry)
            self._round += 1
            # It waits longer than the chief, which names the late.
            end = time.monotonic() + 1.1 * self._timeout_seconds
            return self._get(f"{_folder(number)}/all", 0, entry[1], end)
        try:
            entries = self._collect(_folder(number), entry)
        except PeerError as error:
            self._tell(error)
            raise
        self._set("all", entries)
        self._round += 1
        folder, place = divmod(number, _ROUNDS_PER_FOLDER)
        if folder and not place:
            # All have read what is in it, since they are in this round.
            self._store.key_value_delete(f"armillary/{folder - 1}")
        return entries

    def _collect(self, folder: str, entry: list[str]) -> list[list[str]]:
        """Returns the entries of all, however late and in which order they come."""
        # It waits for one process, and then reads at once what others said meanwhile.
        entries = {0: entry}
        end = time.monotonic() + self._timeout_seconds
        while missing := [i for i in range(self.count) if i not in entries]:
            first = missing[0]
            entries[first] = self._get(f"{folder}/{first}", first, entry[1], end)
            if len(missing) > 1:
                # If that fails, the next `_get` says why.
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    for key, text in self._store.key_value_dir_get(folder):
                        entries[int(key.rpartition("/")[2])] = json.loads(text)
        return [entries[index] for index in range(self.count)]

    def _tell(self, error: BaseException) -> None:
        entry = ["error", "", f"{type(error).__name__}: {error}"]
        # Without the service the others find out that it is gone, and `error` is what
        # this process has to say.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._set(str(self.index), entry)
            if not self.index:
                self._set("all", [entry, *[["value", "", ""]] * (self.count - 1)])

    def _set(self, name: str, value: Any) -> None:
        key = f"{_folder(self._round)}/{name}"
        self._store.key_value_set(key, json.dumps(value))

    def _get(self, key: str, index: int, topic: str, end: float) -> Any:
        """Returns what a process has said, or raises what keeps it from that."""
        has_ended = False
        who = f"Process {index} of {self.count}"
        waiting = f"while process {self.index} waits for it ({topic})"
        while True:
            try:
                # In slices, so that Ctrl-C is heard between them.
                milliseconds = int(1000 * _SLICE_SECONDS)
                text = self._store.blocking_key_value_get(key, milliseconds)
                return json.loads(text)
            except jax.errors.JaxRuntimeError as error:
                failure = error
            is_late = "DEADLINE_EXCEEDED" in str(failure)
            cause = self._find_cause(0.0 if is_late else _VERDICT_SECONDS)
            if cause is not None:
                raise cause
            if not is_late:
                self._fail(
                    f"{who} cannot be reached {waiting}: {failure}. Look at its output "
                    "and at the network, and start all processes again."
                )
            if has_ended:
                self._fail(
                    f"{who} has reached the end of its program, {waiting}. All "
                    "processes must run the same steps, loops and saves."
                )
            # What it said before may have come after the last look.
            has_ended = self._lifeline.has_ended(index)
            if time.monotonic() > end:
                self._fail(
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

    def _fail(self, message: str) -> NoReturn:
        self.has_failed = True
        raise PeerError(message)


def _folder(number: int) -> str:
    return f"armillary/{number // _ROUNDS_PER_FOLDER}/{number}"


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
        self._said = [json.loads(text) for text in texts]
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
