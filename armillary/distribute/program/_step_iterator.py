"""The iterator from which a step takes its batches while it is traced."""

import dis
import inspect
import types
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
        if _is_unpacked(inspect.currentframe()):
            raise TypeError(
                "A step gets an iterator over batches, which cannot be unpacked into "
                "the parts of one batch. Take a batch from it first: "
                "`x, y = next(iterator)`."
            )
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            raise MoreBatches(self.index) from None
        self.num_taken += 1
        return batch

    get_next = __next__


def _is_unpacked(frame: types.FrameType | None) -> bool:
    """Returns whether `x, y = iterator` called `__iter__`, whose frame this is."""
    caller = frame and frame.f_back
    if caller is None or caller.f_lasti < 0:
        return False
    operation = caller.f_code.co_code[caller.f_lasti]
    return dis.opname[operation].startswith("UNPACK_")


def check_taken(step_name: str, taken: Sequence[int]) -> None:
    """Raises if a step took no batch from one of its datasets."""
    if not all(taken):
        raise RetraceError(
            f"`{step_name}` took no batch from dataset {list(taken).index(0)} of "
            f"{len(taken)}, so its data would never end. Call `next(iterator)` "
            "on each iterator, or leave the dataset out."
        )
