"""The iterators that a step gets while it is traced."""

from collections.abc import Sequence
from typing import Any, Self

from armillary.errors import RetraceError
from armillary.typing import PyTree


class MoreBatches(BaseException):
    """A step called `next` more often than batches were offered.

    Not an `Exception`, so that the user's own handlers let it pass.
    """

    def __init__(self, index: int) -> None:
        self.index = index


class StepIterator:
    """Hands out the batches of one step, and counts how many it takes."""

    def __init__(self, index: int, batches: Sequence[PyTree]) -> None:
        self.index = index
        self.num_taken = 0
        self._batches = batches

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Returns the next batch of the step."""
        if self.num_taken == len(self._batches):
            raise MoreBatches(self.index)
        self.num_taken += 1
        return self._batches[self.num_taken - 1]

    get_next = __next__

    def __getitem__(self, key: Any) -> Any:
        """Says what to write instead."""
        raise TypeError(
            f"A step gets an iterator, not a batch, so it has no item {key!r}. Take "
            "the batch first: `batch = next(iterator)`."
        )


def check_taken(step_name: str, taken: Sequence[int]) -> None:
    """Raises if a step took no batch from one of its datasets."""
    if not all(taken):
        raise RetraceError(
            f"`{step_name}` took no batch from dataset {list(taken).index(0)} of "
            f"{len(taken)}, so its data would never end. Call `next(iterator)` "
            "on each iterator, or leave the dataset out."
        )
