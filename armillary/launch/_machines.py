"""Where the processes of a job run; here, the machine of the launcher."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from armillary.launch._child import Child, Process
from armillary.launch._environment import find_addresses

Say = Callable[[str], None]


class Machines(ABC):
    """The machines on which the workers of one attempt run, then those of the next."""

    @abstractmethod
    async def reserve(self, say: Say, is_ending: asyncio.Event) -> list[str]:
        """Finds a place for each worker; returns their addresses, by index."""

    def describe(self) -> str:
        """Returns where the reserved places are, or nothing if that is clear."""
        return ""

    @abstractmethod
    def start(
        self,
        label: str,
        index: int | None,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> Process:
        """Starts worker `index`, or the evaluator, below a running event loop."""

    def release(self) -> None:
        """Gives the places back, with whatever runs there."""
        return

    def close(self) -> None:
        """Ends all use of the machines, after the last attempt."""
        return


class ThisMachine(Machines):
    """The machine of the launcher, which has a place for every worker."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    async def reserve(self, say: Say, is_ending: asyncio.Event) -> list[str]:
        """Returns free addresses on loopback."""
        del say, is_ending
        return find_addresses(self._num_workers)

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
