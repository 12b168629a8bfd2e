"""The protocol between a summary manager and a file format; several as one."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class SummaryWriter(Protocol):
    """Writes the summaries of one directory.

    A `SummaryManager` makes one writer for each directory, on its first value, and
    calls it from one thread. A writer that is to write a `Histogram`, an `Image` or a
    `Text` has `histogram`, `image` or `text` too, as `TensorBoardWriter` does, and one
    for hyperparameters has `hyperparameters`.
    """

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Writes one value, which may be infinite or not a number."""

    def flush(self) -> None:
        """Brings everything written so far onto the disk."""

    def close(self) -> None:
        """Flushes and closes; no other method is called afterwards."""


class WriterGroup:
    """Hands everything to each of several writers that has a method for it."""

    def __init__(self, writers: Sequence[SummaryWriter]) -> None:
        self._writers = writers

    def __getattr__(self, name: str) -> Callable[..., None]:
        methods = [
            getattr(writer, name) for writer in self._writers if hasattr(writer, name)
        ]
        if self._writers and not methods:
            raise AttributeError(f"none of the writers has a method {name!r}")

        def write(*arguments: Any) -> None:
            for method in methods:
                method(*arguments)

        return write

    def __repr__(self) -> str:
        return ", ".join(type(writer).__name__ for writer in self._writers)
