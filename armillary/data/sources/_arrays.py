"""Examples that can be read by number, such as rows of arrays, with seeded shuffling.

The order of an epoch depends only on the seed and the epoch. So a position is two
numbers: the epoch, and the number of its examples that were used.
"""

import abc
import contextlib
import functools
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from armillary._checks import (
    check_not_negative_int,
    check_one_of,
    check_positive_int,
)
from armillary.advice._foreign_names import answer_attributes
from armillary.data.sources._batch import as_device_values, check_batch
from armillary.data.sources._shuffle import make_order
from armillary.data.sources._source import Source, gives_single_examples
from armillary.data.sources._take import empty_aligned, take_rows
from armillary.errors import ArmillaryError, BatchSizeError, DatasetStateError
from armillary.typing import Batch, PyTree


class IndexedDataset(abc.ABC):
    """Examples in batches, with the options of `from_arrays`."""

    name: str
    is_repositionable = True
    rows_at_once = 0
    """The number of rows to read together; small batches share a read."""
    has_own_order = False
    """True if examples have no meaning without the order, as in a mixture."""

    def __init__(
        self,
        argument: str,
        num_examples: int,
        batch_size: int,
        shuffle_seed: int | None,
        repeat: bool,
        drop_remainder: bool,
    ) -> None:
        if not num_examples:
            raise ValueError(
                f"`{argument}` has 0 examples, but a dataset needs at least one. Pass "
                "at least one example."
            )
        self.argument = argument
        self.num_examples = num_examples
        self.batch_size = check_positive_int("batch_size", batch_size)
        if shuffle_seed is not None:
            check_not_negative_int("shuffle_seed", shuffle_seed)
        check_one_of("repeat", repeat, (True, False))
        check_one_of("drop_remainder", drop_remainder, (True, False))
        if drop_remainder and not repeat and self.batch_size > num_examples:
            raise BatchSizeError(
                f"`batch_size` is {self.batch_size}, but there are {num_examples} "
                "examples, and `drop_remainder=True` leaves no batch of them. Use "
                f"`batch_size={num_examples}` or less."
            )
        self.shuffle_seed = shuffle_seed
        self.is_endless = bool(repeat)
        self.drop_remainder = drop_remainder
        self.full_size = self.batch_size
        self.num_batches: int | None = None
        """Batches in one pass; None if the dataset never ends."""
        if not repeat:
            self.full_size = min(self.batch_size, num_examples)
            num_full, num_left = divmod(num_examples, self.batch_size)
            has_partial = num_left > 0 and not drop_remainder
            self.num_batches = num_full + has_partial
        self._num_passes = 0

    @abc.abstractmethod
    def read_rows(self, rows: np.ndarray) -> Batch:
        """Returns a new batch of the examples with these numbers, in this order."""

    @functools.cached_property
    def row_types(self) -> PyTree:
        """The dtype and the shape of each leaf of an example."""
        first = self.read_rows(np.zeros(1, np.int64))
        checked, _ = check_batch(first, lambda: f"`{self.argument}`")
        return _types_of_rows(checked)

    def take_examples(self, numbers: np.ndarray, batches: np.ndarray) -> PyTree:
        """Returns examples of some batches, in the dtypes of a device.

        Args:
            numbers: The numbers of the examples. `NO_ROW` stands for an example that no
                step uses.
            batches: For each example, the number of its batch.

        Raises:
            TypeError: If an example does not have the types of the first example.
            ValueError: If a value does not fit into the 32 bits of a device.
        """
        rows = take_rows(
            self.read_rows,
            numbers,
            batches,
            types=self.row_types,
            rows_at_once=max(self.rows_at_once, self.batch_size),
            argument=self.argument,
        )
        return as_device_values(rows, lambda: f"`{self.argument}`", numbers)

    @abc.abstractmethod
    def fingerprints(self) -> dict[str, str]:
        """Returns texts that are equal in each run, and differ for other examples."""

    @functools.cached_property
    def order_of_examples(self) -> dict[str, Any]:
        """The values that decide the order of the examples, in types of JSON."""
        order: dict[str, Any] = {
            "examples": self.num_examples,
            "shuffle_seed": self.shuffle_seed,
        }
        if self.shuffle_seed is not None:
            # A release of NumPy may shuffle differently.
            some = make_order(_MAX_SHUFFLED, 0)
            order["shuffle of NumPy"] = fingerprint(np.asarray(some, np.int64))
        return {**order, **self.fingerprints()}

    @property
    def shared_options(self) -> dict[str, Any]:
        """The options that must be equal in all processes, besides the order."""
        return {
            "batch_size": self.batch_size,
            "repeat": self.is_endless,
            "drop_remainder": self.drop_remainder,
        }

    def make_order(self, epoch: int) -> Sequence[int]:
        """Returns the numbers of the examples in the order of an epoch."""
        return make_order(self.num_examples, self.shuffle_seed, epoch)

    def spaced_rows(self, count: int) -> np.ndarray:
        """Returns `count` evenly spaced numbers of examples; all if there are fewer."""
        count = min(count, self.num_examples)
        return np.linspace(0, self.num_examples - 1, count).astype(np.int64)

    def make_iterator(self, epoch: int) -> "IndexedIterator":
        return self.iterate(epoch, self.read_rows)

    def iterate(
        self, epoch: int, read_rows: Callable[[np.ndarray], Batch]
    ) -> "IndexedIterator":
        """Returns an iterator whose batches `read_rows` makes from row numbers."""
        return IndexedIterator(self, epoch, read_rows)

    def __iter__(self) -> Iterator[Batch]:
        """Returns an iterator over the next epoch, for use without a strategy."""
        self._num_passes += 1
        return self.make_iterator(self._num_passes - 1)


answer_attributes(IndexedDataset)


def find_indexed(source: Source) -> IndexedDataset | None:
    """Returns the dataset that reads a source by row numbers, if there is one."""
    if isinstance(source, IndexedDataset):
        return source
    by_number = getattr(source, "by_number", None)
    return None if by_number is None else by_number()


def _types_of_rows(arrays: PyTree) -> PyTree:
    def type_of(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)

    return jax.tree.map(type_of, arrays)


def fingerprint(*parts: bytes | np.ndarray) -> str:
    """Returns a short text that is equal for equal bytes."""
    return fingerprint_all(parts)


def fingerprint_all(parts: Iterable[bytes | np.ndarray]) -> str:
    """Returns the fingerprint of parts that need not exist at the same time."""
    crc = 0
    for part in parts:
        if isinstance(part, np.ndarray):
            flat = np.ascontiguousarray(part).reshape(-1)
            part = flat.view(np.uint8).data
        crc = zlib.crc32(part, crc)
    return f"#{crc:08x}"


class IndexedIterator:
    """Yields the batches of an epoch, and of the following epochs if data repeats.

    `read_rows` makes a batch from the numbers of its examples.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        epoch: int,
        read_rows: Callable[[np.ndarray], Batch],
    ) -> None:
        self._dataset = dataset
        self._read_rows = read_rows
        self._go_to(epoch, 0)

    def _go_to(self, epoch: int, index: int) -> None:
        self._begin(epoch, index)
        self._place = (epoch, index)  # after the last batch that was returned
        self._ahead: Iterator[tuple[Batch, tuple[int, int]]] = iter(())

    def _begin(self, epoch: int, index: int = 0) -> None:
        self._epoch = epoch
        self._index = index
        self._order = self._dataset.make_order(epoch)

    def __iter__(self) -> "IndexedIterator":
        return self

    def __next__(self) -> Batch:
        # First the rest of the last read, and then the next read.
        for ahead in (self._ahead, self._read()):
            self._ahead = ahead
            for batch, self._place in ahead:
                return batch
        raise StopIteration

    def _read(self) -> Iterator[tuple[Batch, tuple[int, int]]]:
        """Yields the batches of one read, each with the place after it."""
        dataset = self._dataset
        drawn: list[tuple[np.ndarray, tuple[int, int]]] = []
        while len(drawn) * dataset.batch_size < max(1, dataset.rows_at_once):
            rows = self._draw()
            if not len(rows):
                break
            drawn.append((rows, (self._epoch, self._index)))

        together = None
        if len(drawn) > 1:
            every_row = np.concatenate([rows for rows, _ in drawn])
            # After an error, each batch is read alone, and only the bad batch raises.
            with contextlib.suppress(ArmillaryError):
                together = self._read_rows(every_row)

        start = 0
        for rows, place in drawn:
            stop = start + len(rows)
            if together is None:
                batch = self._read_rows(rows)
            else:
                batch = jax.tree.map(operator.itemgetter(slice(start, stop)), together)
            start = stop
            yield batch, place

    def _draw(self) -> np.ndarray:
        """Returns the row numbers of the next batch; an empty array at the end."""
        dataset = self._dataset
        size = dataset.batch_size
        rows = self._take_from_order(self._index, size)
        self._index += len(rows)
        while dataset.is_endless and len(rows) < size:
            self._begin(self._epoch + 1)
            part = self._take_from_order(0, size - len(rows))
            self._index = len(part)
            rows = np.concatenate([rows, part])
        is_dropped = dataset.drop_remainder and len(rows) < size
        return rows[:0] if is_dropped else rows

    def _take_from_order(self, start: int, count: int) -> np.ndarray:
        return np.asarray(self._order[start : start + count], np.int64)

    def get_state(self) -> dict[str, int]:
        epoch, index = self._place
        count = self._dataset.num_examples
        return {"epoch": epoch, "index": index, "num_examples": count}

    def set_state(self, state: dict[str, Any]) -> None:
        count = self._dataset.num_examples
        epoch = state["epoch"]
        index = state["index"]
        is_inside = epoch >= 0 and 0 <= index <= count
        if state["num_examples"] != count or not is_inside:
            raise DatasetStateError(
                f"`state` is {state!r}, which is not a place in {count} examples. Pass "
                "the data that it was saved with."
            )
        self._go_to(epoch, index)


_MAX_SHUFFLED = 1024
"""The numbers whose shuffle shows whether NumPy shuffles as at a save."""
_MAX_BYTES = 2**28
"""A fingerprint reads arrays up to this size completely, in a tenth of a second."""
_MAX_ROWS = 1024


def from_arrays(
    arrays: PyTree,
    *,
    batch_size: int,
    shuffle_seed: int | None = None,
    repeat: bool = False,
    drop_remainder: bool = False,
) -> "ArrayDataset":
    """Returns a dataset of the rows of `arrays`, in batches.

    Args:
        arrays: Pytree of NumPy or JAX arrays whose first axis counts examples. They are
            not copied: do not write to them while the dataset is in use.
        batch_size: Examples in one batch of all replicas together. If a function with
            an `InputContext` returns the dataset, it is the examples of one replica.
        shuffle_seed: Seed of the order. Every epoch has its own order, which depends
            only on the seed and the epoch. None keeps the order of the arrays.
        repeat: Whether the dataset never ends. Batches then run across the ends of
            epochs, so all batches are full, and each epoch uses every example once.
        drop_remainder: Whether to leave out the last batch of an epoch if it is not
            full.

    Returns:
        A dataset. Each pass over it is the next epoch. Positions count examples, so a
        position can be restored with a different batch size.

    Raises:
        TypeError: If `arrays` has no leaf or a leaf is not an array of numbers.
        ValueError: If there is no example, or another argument is wrong.
        BatchSizeError: If leading sizes differ, or `drop_remainder` leaves no batch.
    """
    is_leaf = jax.tree_util.all_leaves([arrays])
    if is_leaf and not hasattr(arrays, "__array__") and gives_single_examples(arrays):
        raise TypeError(
            f"`arrays` is of type {type(arrays).__name__}, which gives single "
            "examples by index, but it must be a pytree of arrays. Use "
            "`armillary.data.from_random_access(arrays, batch_size=...)`."
        )
    return ArrayDataset(arrays, batch_size, shuffle_seed, repeat, drop_remainder)


class ArrayDataset(IndexedDataset):
    """Rows of arrays in batches; made by `from_arrays`, which documents it."""

    name = "arrays"

    def __init__(self, arrays: PyTree, *options: Any, argument: str = "arrays") -> None:
        self.arrays, num_examples = check_batch(arrays, lambda: f"`{argument}`")
        super().__init__(argument, num_examples, *options)

    @functools.cached_property
    def row_types(self) -> PyTree:
        return _types_of_rows(self.arrays)

    def read_rows(self, rows: np.ndarray) -> Batch:
        """Returns these rows of all arrays, copied."""

        def read(array: np.ndarray) -> np.ndarray:
            taken = empty_aligned((len(rows), *array.shape[1:]), array.dtype)
            # The numbers come from the dataset itself. With `mode="raise"`, NumPy
            # would copy the rows once more.
            return np.take(array, rows, axis=0, out=taken, mode="clip")

        return jax.tree.map(read, self.arrays)

    def take_examples(self, numbers: np.ndarray, batches: np.ndarray) -> PyTree:
        del batches  # A row in memory may be read several times.
        rows = self.read_rows(numbers)
        return as_device_values(rows, lambda: f"`{self.argument}`", numbers)

    def fingerprints(self) -> dict[str, str]:
        """Returns dtype, shape and a checksum of each array; samples large arrays."""
        found: dict[str, str] = {}
        for keys, array in jax.tree_util.tree_leaves_with_path(self.arrays):
            path = jax.tree_util.keystr(keys, simple=True, separator="/")
            name = f"array {path}".strip()  # An array alone has an empty path.
            rows = array
            if array.nbytes > _MAX_BYTES:
                rows = np.take(array, self.spaced_rows(_MAX_ROWS), axis=0)
            found[name] = f"{array.dtype} {array.shape} {fingerprint(rows)}"
        return found
