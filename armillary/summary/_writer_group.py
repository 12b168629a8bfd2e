"""Several writers of one directory, as one."""

from collections.abc import Callable, Sequence
from typing import Any

from armillary.summary._writer import SummaryWriter


class WriterGroup:
    """Hands everything to each of several writers.

    What not every writer has a method for goes to those that have one.

    Args:
        writers: The writers.
    """

    def __init__(self, writers: Sequence[SummaryWriter]) -> None:
        self._writers = writers

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Writes one value."""
        for writer in self._writers:
            writer.scalar(tag, value, step)

    def flush(self) -> None:
        """Brings everything written so far to where it belongs."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Closes all writers."""
        for writer in self._writers:
            writer.close()

    def __getattr__(self, name: str) -> Callable[..., None]:
        methods = [
            getattr(writer, name) for writer in self._writers if hasattr(writer, name)
        ]
        if not methods:
            raise AttributeError(f"none of the writers has a method {name!r}")

        def write(*arguments: Any) -> None:
            for method in methods:
                method(*arguments)

        return write

    def __repr__(self) -> str:
        return ", ".join(type(writer).__name__ for writer in self._writers)


def group_writers(
    makers: Sequence[Callable[[str], SummaryWriter]],
) -> Callable[[str], SummaryWriter]:
    """Returns what makes a writer of a directory that stands for several."""
    return lambda directory: WriterGroup([make(directory) for make in makers])
