"""Examples by number: data of the user, and examples that are made from others.

`select` and `pack` return examples of this kind, so they can follow one another, and
`from_random_access` and `mix` make batches of their results.
"""

import abc
import operator
import sys
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from armillary.data.sources._arrays import IndexedDataset
from armillary.data.sources._batch import is_nest_of_arrays
from armillary.data.sources._source import is_kind
from armillary.typing import Batch, PyTree


@runtime_checkable
class RandomAccess(Protocol):
    """Examples by number, as in map-style datasets of PyTorch and sources of Grain."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> PyTree: ...


class Examples(abc.ABC):
    """Examples by number that are made from other examples."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitems__(self, numbers: Sequence[int]) -> list[PyTree]:
        """Returns the examples with these numbers."""

    @abc.abstractmethod
    def fingerprints(self) -> dict[str, str]:
        """Returns texts that differ if the examples were chosen or made differently."""

    def __getitem__(self, number: int) -> PyTree:
        """Returns the example with this number; negative numbers count from the end."""
        (example,) = self.__getitems__([range(len(self))[operator.index(number)]])
        return example


def _has_rows(source: Any) -> bool:
    """Returns whether a source of other arguments is read by number here.

    The items of an array are its examples. The examples of a `datasets.Dataset` may
    hold text, because they are chosen or packed before a batch is made.
    """
    is_array = isinstance(source, np.ndarray) and source.ndim > 0
    return is_array or is_kind(source, "datasets", "Dataset")


class ExampleReader:
    """Reads the examples of a source by number, several at once if it allows that.

    Args:
        source: Examples by number, such as a list, an array or a `datasets.Dataset`,
            or a dataset of `from_arrays` and similar functions.
        argument: The argument with the source, for messages.

    Raises:
        TypeError: If the source has no examples by number.
        ValueError: If the source is a dataset that is shuffled, or repeats.
    """

    def __init__(self, source: Any, argument: str) -> None:
        if isinstance(source, jax.Array):
            source = np.asarray(source)  # One copy, and not one for each example.
        self._source = source
        self._argument = argument
        if isinstance(source, IndexedDataset):
            check_is_plain(source, argument)
            self.num_examples = source.num_examples
        elif _has_rows(source):
            self.num_examples = len(source)
        else:
            self.num_examples = count_examples(source, argument)

    def read(self, numbers: Sequence[int]) -> Sequence[PyTree]:
        """Returns the examples with these numbers."""
        source = self._source
        if not isinstance(source, IndexedDataset):
            return read_examples(source, list(numbers), self._argument)
        return _unstack(source.read_rows(np.asarray(numbers, np.int64)))

    def fingerprints(self) -> dict[str, str]:
        """Returns the texts of a source that is made from another source."""
        return find_fingerprints(self._source)


def as_vector(values: Any) -> np.ndarray | None:
    """Returns values with one axis as an array, or `None` if they are none."""
    try:
        array = np.asarray(values)
    except ValueError:  # Lists of several lengths.
        return None
    if array.ndim != 1:
        return None
    # NumPy gives an empty list the dtype of fractions.
    return array if array.size else array.astype(np.int64)


def _unstack(rows: Batch) -> list[PyTree]:
    leaves, structure = jax.tree.flatten(rows)
    return [structure.unflatten(parts) for parts in zip(*leaves, strict=True)]


def find_fingerprints(source: Any) -> dict[str, str]:
    """Returns the fingerprints of examples that are made from other examples."""
    return source.fingerprints() if isinstance(source, Examples) else {}


def check_is_plain(dataset: IndexedDataset, argument: str) -> None:
    """Raises if a dataset, of which only the examples are used, has an order.

    Raises:
        ValueError: If it is a mixture, is shuffled, repeats, or leaves examples out.
    """
    if dataset.has_own_order:
        raise ValueError(
            f"`{argument}` is a {dataset.name}, but only the examples of a dataset are "
            "used here, in an order of their own. A mixture comes last: select and "
            "pack its sources first. In place of a mixture of mixtures, mix all "
            "sources, with the products of their weights."
        )
    options = {
        "shuffle_seed": (dataset.shuffle_seed, None),
        "repeat": (dataset.is_endless, False),
        "drop_remainder": (dataset.drop_remainder, False),
    }
    for name, (value, plain) in options.items():
        if value != plain:
            raise ValueError(
                f"`{argument}` is a dataset with `{name}={value!r}`, but only its "
                "examples are used, in an order of their own. Leave out "
                f"`{name}` there."
            )


def read_examples(
    source: Any, numbers: list[int], argument: str = "source"
) -> Sequence[PyTree]:
    """Returns the examples of a few numbers."""
    if not callable(getattr(source, "__getitems__", None)):
        return [source[number] for number in numbers]
    examples = source.__getitems__(numbers)
    is_list = isinstance(examples, Sequence)
    if not is_list or len(examples) != len(numbers):
        count = f" of {len(examples)} examples" if is_list else ""
        raise TypeError(
            f"`{argument}.__getitems__` was called with {len(numbers)} numbers, and "
            f"returned {type(examples).__name__}{count}, but it must return a list "
            "with one example for each number."
        )
    return examples


def count_examples(source: Any, argument: str = "source") -> int:
    """Returns the number of examples, or explains why `source` does not fit."""
    kind = type(source).__name__
    if any(is_kind(source, "datasets", name) for name in ("Dataset", "DatasetDict")):
        raise TypeError(
            f"`{argument}` is a `datasets.{kind}`. Use "
            "`armillary.data.from_huggingface(dataset, batch_size=...)` with one "
            "split."
        )
    for name, fix in (("Series", "to_list()"), ("DataFrame", 'to_dict("records")')):
        if is_kind(source, "pandas", name):
            raise TypeError(
                f"`{argument}` is a `pandas.{kind}`, which finds entries by their "
                "labels, but examples are found by their numbers. Pass "
                f"`{argument}.{fix}`."
            )
    if is_nest_of_arrays(source):
        raise TypeError(
            f"`{argument}` is a {kind} of arrays, but it must give one example for "
            "each number. Use `armillary.data.from_arrays(arrays, batch_size=...)`."
        )
    # A class has the methods of its objects, but none of their examples.
    is_class = isinstance(source, type)
    if is_class or not isinstance(source, RandomAccess):
        missing: list[str] = []
        for name in ("__len__", "__getitem__"):
            if is_class or not hasattr(source, name):
                missing.append(f"`{name}`")
        raise TypeError(
            f"`{argument}` is {source!r:.80} of type {kind}, which has no "
            f"{' and no '.join(missing)}, but it must have a length, and one example "
            "for each number from 0. Pass data that can only be iterated, such as a "
            "loader, to `strategy.distribute_dataset` directly."
        )

    try:
        count = len(source)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"`len({argument})` of the {kind} failed: {type(error).__name__}: {error}. "
            "Return the number of examples from `__len__`."
        ) from error
    if count == sys.maxsize:
        raise ValueError(
            f"`len({argument})` is {count}, so the {kind} repeats forever. Pass it "
            "without its own repetition. `from_random_access(..., repeat=True)` and "
            "`mix` repeat the examples."
        )
    return count
