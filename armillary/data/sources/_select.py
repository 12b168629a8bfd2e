"""Filters: some of the examples of a source, chosen once, under new numbers."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from armillary.data.sources._arrays import fingerprint
from armillary.data.sources._examples import ExampleReader, Examples, as_vector
from armillary.typing import PyTree

_AT_ONCE = 1024
"""The number of examples that a filter reads together."""
_FIXES = (
    "Pass a function of one example, a boolean for each example, or the numbers of "
    "the examples to keep."
)


def select(source: Any, keep: Any, *, metadata: Any = None) -> "SelectedExamples":
    """Returns the examples of `source` that a filter keeps.

    The filter runs once, in each process. The result has new numbers from 0, so every
    position counts kept examples only, and a run resumes exactly. The filter must keep
    the same examples in each process and in a resumed run, or there is an error::

        english = armillary.data.select(
            documents, lambda row: row["language"] == "en", metadata=table
        )

    Args:
        source: Examples by number, such as a list, an array or a `datasets.Dataset`,
            or a dataset of `from_arrays` and similar functions, of which only the
            examples are used.
        keep: The filter: a function that returns whether to keep an example; an array
            with a boolean for each example; or an array with the numbers of the
            examples to keep, in the order in which to keep them, each at most once.
        metadata: The argument of the function `keep` for each example, by number, such
            as a list or an array. By default, it is the example, so all examples are
            read once.

    Returns:
        Examples by number, for `from_random_access`, `mix`, `pack` or `select`.

    Raises:
        TypeError: If `source` or `metadata` has no examples by number, or `keep` is
            none of the above.
        ValueError: If no example is kept, a number in `keep` is wrong, or lengths
            differ.
    """
    reader = ExampleReader(source, "source")
    count = reader.num_examples
    if callable(keep):
        inputs = reader
        if metadata is not None:
            inputs = ExampleReader(metadata, "metadata")
            _check_length("metadata", inputs.num_examples, count)
        numbers = _find_kept(keep, inputs)
    elif metadata is not None:
        raise TypeError(
            "`metadata` is the argument of a function `keep`, but `keep` is of type "
            f"{type(keep).__name__}. Leave out `metadata`."
        )
    else:
        numbers = _as_numbers(keep, count)
    if not len(numbers):
        raise ValueError(
            f"`keep` keeps none of the {count} examples, but at least one is needed. "
            "Change the filter."
        )
    return SelectedExamples(reader, numbers)


class SelectedExamples(Examples):
    """Some examples of a source; made by `select`, which documents it.

    Attributes:
        numbers: The number that each example has in the source, of shape `(count,)`.
    """

    def __init__(self, reader: ExampleReader, numbers: np.ndarray) -> None:
        self._reader = reader
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"SelectedExamples({len(self):,} of {self._reader.num_examples:,})"

    def __getitems__(self, numbers: Sequence[int]) -> list[PyTree]:
        own = self.numbers[np.asarray(numbers, np.int64)]
        return list(self._reader.read(own.tolist()))

    def fingerprints(self) -> dict[str, str]:
        source = repr(self._reader.fingerprints()).encode()
        return {"filter": fingerprint(self.numbers, source)}


def _find_kept(keep: Callable[[Any], Any], inputs: ExampleReader) -> np.ndarray:
    """Returns the numbers of the examples for which a function is true."""
    kept = np.zeros(inputs.num_examples, bool)
    for start in range(0, len(kept), _AT_ONCE):
        numbers = range(start, min(start + _AT_ONCE, len(kept)))
        examples = inputs.read(numbers)
        for number, example in zip(numbers, examples, strict=True):
            kept[number] = _as_bool(keep(example), number)
    return np.flatnonzero(kept)


def _as_bool(value: Any, number: int) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"`keep` returned {value!r:.80} of type {type(value).__name__} for example "
            f"{number}, but it must return True or False."
        )
    return bool(value)


def _as_numbers(keep: Any, count: int) -> np.ndarray:
    """Returns the numbers that an array of booleans or of numbers stands for."""
    array = as_vector(keep)
    if array is None or array.dtype.kind not in "biu":
        raise TypeError(
            f"`keep` is {keep!r:.80} of type {type(keep).__name__}, but it must be a "
            f"filter. {_FIXES}"
        )
    if array.dtype == bool:
        _check_length("keep", len(array), count)
        return np.flatnonzero(array)
    outside = array[(array < 0) | (array >= count)]
    if len(outside):
        raise ValueError(
            f"`keep` has the number {outside[0]}, but `source` has the examples 0 to "
            f"{count - 1}. {_FIXES}"
        )
    numbers, counts = np.unique(array, return_counts=True)
    if len(numbers) < len(array):
        raise ValueError(
            f"`keep` has the number {numbers[counts > 1][0]} more than once, but an "
            "example can be kept only once. For a larger share of some examples, give "
            "them a weight in `armillary.data.mix`."
        )
    return cast(np.ndarray, array.astype(np.int64))


def _check_length(name: str, length: int, count: int) -> None:
    if length != count:
        raise ValueError(
            f"`{name}` has length {length}, but `source` has {count} examples. Pass "
            "one entry for each example."
        )
