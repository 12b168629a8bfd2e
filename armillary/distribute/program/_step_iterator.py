"""The iterator from which a step takes its batches while it is traced."""

from collections.abc import Iterable, Sequence
from typing import Any, Self

from armillary.errors import RetraceError
from armillary.typing import PyTree


class MoreBatches(BaseException):
    """A step called `next` too often.

    It is not an `Exception`, so the user's handlers do not catch it.
    """

    def __init__(self, index: int) -> None:
        self.index = index


class StepIterator:
    """Gives batches to one step, and counts them."""

    def __init__(self, index: int, batches: Iterable[PyTree]) -> None:
        self.index = index
        self.num_taken = 0
        self._batches = iter(batches)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            raise MoreBatches(self.index) from None
        self.num_taken += 1
        return batch

    get_next = __next__


def check_taken(step_name: str, taken: Sequence[int]) -> None:
    """Raises if a step took no batch from one of its datasets."""
    if not all(taken):
        raise RetraceError(
            f"`{step_name}` took no batch from dataset {list(taken).index(0)} of "
            f"{len(taken)}, so its data would never end. Call `next(iterator)` "
            "on each iterator, or leave the dataset out."
        )
