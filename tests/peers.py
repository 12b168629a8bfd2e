"""Simulated processes: threads that agree over connections in memory."""

import threading
from collections.abc import Callable
from typing import Any

from armillary.cluster._peers import Peers
from armillary.lifeline._lifeline import Lifeline
from tests.patience import patience


class Wired(Lifeline):
    """A lifeline without a thread: what it says arrives at once."""

    lock = threading.RLock()

    def connect(self, others: list["Wired"]) -> None:
        tree = self._tree
        for index in (tree.parent, *tree.children):
            if index is not None:
                tree.links[index] = Wire(self._index, others[index])

    def wait_for_verdict(self, timeout_seconds: float) -> str | None:
        return self.verdict

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        with self.lock:
            function(*arguments)


class Wire:
    """The way from one process to another one."""

    def __init__(self, source: int, target: Wired) -> None:
        self._source, self._target = source, target

    def write(self, data: bytes) -> None:
        for line in data.splitlines():
            self._target._tree.take(self._source, line)


def make_peers(count: int = 2, timeout_seconds: float = 300.0) -> list[Peers]:
    """Returns what each of so many processes has of the others."""
    lifelines = [Wired(index, count) for index in range(count)]
    for lifeline in lifelines:
        lifeline.connect(lifelines)
    return [
        Peers(index, count, timeout_seconds, lifeline)
        for index, lifeline in enumerate(lifelines)
    ]


def run_together(
    fn: Callable[[Peers], Any], count: int = 2, timeout_seconds: float = 300.0
) -> list[Any]:
    """Returns what `fn` returned, or raised, in each of so many processes."""
    outcomes: list[Any] = [None] * count

    def run(peers: Peers) -> None:
        try:
            outcomes[peers.index] = fn(peers)
        except Exception as error:
            outcomes[peers.index] = error

    threads = [
        threading.Thread(target=run, args=(peers,))
        for peers in make_peers(count, timeout_seconds)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(120))
        assert not thread.is_alive()
    return outcomes
