"""The protocol between a summary manager and a file format."""

from typing import Protocol, runtime_checkable


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
        ...

    def flush(self) -> None:
        """Brings everything written so far onto the disk."""
        ...

    def close(self) -> None:
        """Flushes and closes; no other method is called afterwards."""
        ...
