"""The bytes that a save or a restore has moved so far.

A report of a process that is stuck or gone has them, and they count as progress. They
show whether a file system has stopped, or whether there is much to move.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from armillary._format import format_bytes


def _count_none() -> int:
    return 0


class Transfer:
    """One file or several files that a thread writes, reads or sends.

    Args:
        phase: The phase of the program that waits for it, such as `"saving"`.
        verb: The word for bytes that were moved, such as `"written"`.
        total: About the number of bytes to move; 0 if it is not known.
        count_others: Returns the bytes that another library has moved since the program
            began. It must not wait for a file system, which may be stuck.
    """

    def __init__(
        self,
        phase: str,
        verb: str,
        total: int,
        count_others: Callable[[], int] = _count_none,
    ) -> None:
        self.phase = phase
        self._verb = verb
        self._total = total
        self._count_others = count_others
        self._start = count_others()
        self._num_added = 0
        self._num_ended = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Adds bytes that were moved; several threads may call it."""
        with self._lock:
            self._num_added += num_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes so far."""
        return self._num_added + self._count_others() - self._start

    def __str__(self) -> str:
        done = format_bytes(self.num_bytes)
        total = f" of {format_bytes(self._total)}" if self._total else ""
        return f"{done}{total} {self._verb}"

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Adds it to the reports of this process while a block runs.

        A transfer may have several blocks, in different threads, one after the other.
        """
        _running.append(self)
        try:
            yield
        finally:
            num_bytes = self.num_bytes
            _ended[self.phase] += num_bytes - self._num_ended
            self._num_ended = num_bytes
            _running.remove(self)


# Threads that save in the background change these, and the lifeline reads them.
_running: list[Transfer] = []
_ended: Counter[str] = Counter()


def find_transfers(phase: str) -> list[Transfer]:
    """Returns the transfers of a phase that are not complete yet."""
    return [transfer for transfer in list(_running) if transfer.phase == phase]


def count_bytes(phase: str) -> int:
    """Returns the bytes that were moved in a phase since the program began."""
    running = find_transfers(phase)
    return _ended[phase] + sum(
        transfer.num_bytes - transfer._num_ended for transfer in running
    )
