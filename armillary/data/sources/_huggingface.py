"""Data sets of Hugging Face's `datasets` as sources.

A `Dataset` can be read by number: `from_huggingface` gives it the order and the
positions of arrays. An `IterableDataset` has its own order, and gives its batches as
they are. Nothing here imports `datasets`.
"""

import sys
from typing import Any

import numpy as np

from armillary._checks import list_lines
from armillary.data.sources._indexed import IndexedDataset, fingerprint
from armillary.data.sources._stateful import StatefulSource
from armillary.typing import Batch

_MOST_READ = 16
"""How many examples a fingerprint reads."""


def from_huggingface(
    dataset: Any,
    *,
    batch_size: int,
    shuffle_seed: int | None = None,
    repeat: bool = False,
    drop_remainder: bool = False,
) -> "HuggingFaceDataset":
    """Returns a data set of the examples of a `datasets.Dataset`, in batches.

    A batch is a dictionary of NumPy arrays, one for each column. Numbers have the
    dtypes of `dataset.with_format("numpy")`. A transform (`with_transform`) is kept::

        dataset = datasets.load_dataset("mnist", split="train")
        data = armillary.data.from_huggingface(
            dataset, batch_size=64, shuffle_seed=0, repeat=True
        )

    Args:
        dataset: Its columns, or what its transform makes of them, hold numbers:
            `dataset.select_columns([...])` leaves others out. Lists have one length.
        batch_size: As in `from_arrays`, like all that follow.
        shuffle_seed: Seed of the order.
        repeat: Whether the data set never ends.
        drop_remainder: Whether to leave out a last batch that is not full.

    Returns:
        A data set. Each pass over it is the next epoch. Positions count examples, so
        that one can be restored with another batch size.

    Raises:
        TypeError: If `dataset` is no `datasets.Dataset`, or columns hold something else
            than numbers.
        ValueError: If there is no example, or another argument is wrong.
        BatchSizeError: If `drop_remainder` leaves no batch.
    """
    return HuggingFaceDataset(
        dataset,
        batch_size=batch_size,
        shuffle_seed=shuffle_seed,
        repeat=repeat,
        drop_remainder=drop_remainder,
    )


class HuggingFaceDataset(IndexedDataset):
    """Examples in batches; made by `from_huggingface`, which documents it."""

    name = "Hugging Face Dataset"

    def __init__(self, dataset: Any, **options: Any) -> None:
        if not _is_kind(dataset, "Dataset"):
            raise TypeError(_describe_other(dataset))
        if not len(dataset):
            raise ValueError(
                "`dataset` has 0 examples, but a data set needs at least one. Pass one "
                "with rows."
            )
        super().__init__(len(dataset), **options)
        kept = dataset.format["type"] == "custom"
        self._dataset = dataset if kept else _with_numpy(dataset)
        # What no device can hold shows here, and not in the middle of a program.
        self.read_rows(np.zeros(1, np.int64))

    def read_rows(self, rows: np.ndarray) -> Batch:
        """Returns these examples.

        Raises:
            TypeError: If columns hold something else than numbers.
        """
        return as_arrays(self._dataset[rows])

    def fingerprints(self) -> dict[str, str]:
        """Returns a checksum of some examples as they are stored: no transform runs."""
        some = self._dataset.with_format("arrow")[self.spaced_rows(_MOST_READ)]
        return {"rows": fingerprint(repr(some.to_pylist()).encode())}


def as_huggingface_source(source: Any) -> StatefulSource | None:
    """Returns a source if `source` is an `IterableDataset`, or None.

    Raises:
        TypeError: If it is a `Dataset`, whose elements are examples.
    """
    if _is_kind(source, "Dataset") or _is_kind(source, "DatasetDict"):
        raise TypeError(
            f"The data set is a `datasets.{type(source).__name__}`, but it must give "
            "batches. Use `armillary.data.from_huggingface(dataset, batch_size=...)` "
            "with one split."
        )
    if not _is_kind(source, "IterableDataset"):
        return None
    name, has_buffer = "Hugging Face IterableDataset", _has_buffer(source._ex_iterable)
    start = source.state_dict()

    def begin(epoch: int) -> None:
        source.set_epoch(epoch)
        source.load_state_dict(start)  # Not the position of an earlier pass.

    return StatefulSource(
        source,
        f"{name} with a shuffle buffer" if has_buffer else name,
        as_arrays,
        begin=begin,
        is_repositionable=not has_buffer,
    )


def as_arrays(batch: Any) -> dict[str, np.ndarray]:
    """Returns a batch with an array for each column.

    Raises:
        TypeError: If a column holds no numbers, or lists of several lengths.
    """
    arrays = {name: _as_array(column) for name, column in batch.items()}
    wrong = {
        name: _find_problem(array, batch[name])
        for name, array in arrays.items()
        if array.dtype.kind in "OUSMm" or not array.ndim
    }
    if wrong:
        lines = [f"{name}: {problem}" for name, problem in wrong.items()]
        raise TypeError(
            "The data set of Hugging Face has columns that are no arrays of numbers:\n"
            f"{list_lines(lines)}\n"
            "Change them with `dataset.map`, or leave them out: "
            f"`dataset.remove_columns({list(wrong)})`."
        )
    return arrays


def _as_array(column: Any) -> np.ndarray:
    try:
        return np.asarray(column)
    except ValueError:  # Lists of several lengths.
        return np.asarray([None])


def _find_problem(array: np.ndarray, column: Any) -> str:
    if not array.ndim:
        return "one value without a batch axis; use `dataset.batch(batch_size)`"
    if array.dtype.kind in "US" or isinstance(column[0], str | bytes):
        return "strings; tokenize or remove them"
    if array.dtype.kind in "Mm":
        return "times; make numbers of them"
    if isinstance(column[0], list | np.ndarray):
        return "lists of several lengths; pad them to one length"
    return f"objects such as {column[0]!r:.40}"


def _with_numpy(dataset: Any) -> Any:
    format = dataset.format
    return dataset.with_format(
        "numpy",
        columns=format["columns"],
        output_all_columns=format["output_all_columns"],
    )


def _is_kind(value: Any, kind: str) -> bool:
    """Returns whether `value` is of a class of `datasets`."""
    found = getattr(sys.modules.get("datasets"), kind, None)
    return found is not None and isinstance(value, found)


def _describe_other(dataset: Any) -> str:
    if _is_kind(dataset, "IterableDataset"):
        return (
            "`dataset` is an `IterableDataset`, whose examples have no numbers. Use it "
            "as it is, with batches: `dataset.batch(batch_size)`."
        )
    return (
        f"`dataset` is of type {type(dataset).__name__}, but it must be a "
        "`datasets.Dataset`. Pass one split, such as `dataset['train']`."
    )


def _has_buffer(examples: Any) -> bool:
    """Returns whether examples come from a buffer, which a position does not hold."""
    if type(examples).__name__ == "BufferShuffledExamplesIterable":
        return True
    inner = [getattr(examples, "ex_iterable", None)]
    inner += getattr(examples, "ex_iterables", [])
    return any(_has_buffer(each) for each in inner if each is not None)
