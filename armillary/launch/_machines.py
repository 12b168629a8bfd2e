"""Where the processes of a job run; here, the machine of the launcher."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from typing import Protocol

from armillary.launch._child import Child
from armillary.launch._environment import find_addresses
from armillary.launch._outcome import Ending
from armillary.launch._output import Stream

Say = Callable[[str], None]


class Process(Protocol):
    """A running process of a job, such as a `Child`.

    Attributes:
        label: Its name, such as `worker 0`.
        ended: How it ended, once it has.
        stdout, stderr: What it says.
    """

    @property
    def label(self) -> str: ...
    @property
    def ended(self) -> "asyncio.Future[Ending]": ...
    @property
    def stdout(self) -> FileIO | Stream: ...
    @property
    def stderr(self) -> FileIO | Stream: ...

    def look(self) -> None:
        """Sets `ended` if the process has ended; called at each SIGCHLD."""

    def kill(self) -> None:
        """Ends the process, if it runs; `ended` is set after that."""

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process alone, if it runs."""


class Machines(Protocol):
    """The machines on which the workers of one attempt run, then those of the next."""

    async def reserve(self, say: Say, is_ending: asyncio.Event) -> list[str]:
        """Finds a place for each worker; returns their addresses, by index.

        Args:
            say: Says what is waited for.
            is_ending: Ends the wait; then there are no addresses.

        Raises:
            OSError: If a worker could not start there.
        """
        ...

    def describe(self) -> str:
        """Returns where the reserved places are, or nothing if that is clear."""
        ...

    def start(
        self,
        label: str,
        index: int | None,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> Process:
        """Starts worker `index`, or the evaluator, below a running event loop.

        Raises:
            OSError: If the system does not start another process.
        """
        ...

    def release(self) -> None:
        """Gives the places back, with whatever runs there."""

    def close(self) -> None:
        """Ends all use of the machines, after the last attempt."""


class ThisMachine:
    """The machine of the launcher, which has a place for every worker.

    Args:
        num_workers: Number of workers.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    async def reserve(self, say: Say, is_ending: asyncio.Event) -> list[str]:
        """Returns free addresses on loopback."""
        del say, is_ending
        return find_addresses(self._num_workers)

    def describe(self) -> str:
        """Returns nothing: there is one machine."""
        return ""

    def start(
        self,
        label: str,
        index: int | None,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> Process:
        """Starts a process here."""
        del index
        return Child(label, arguments, environment)

    def release(self) -> None:
        """Does nothing: a process that has ended holds nothing here."""

    def close(self) -> None:
        """Does nothing."""
