"""Arrays in memory as a source, with seeded shuffling.

The order of an epoch depends on the seed and the epoch alone, so a position is two
numbers: the epoch, and how many of its examples were used.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from armillary._checks import check_not_negative_int, check_positive_int
from armillary.data.sources._batch import check_batch
from armillary.errors import BatchSizeError, DatasetStateError
from armillary.typing import Batch, PyTree


def from_arrays(
    arrays: PyTree,
    *,
    batch_size: int,
    shuffle_seed: int | None = None,
    repeat: bool = False,
    drop_remainder: bool = False,
) -> "ArrayDataset":
    """Returns a data set of the rows of `arrays`, in batches.

    Args:
        arrays: Pytree of NumPy or JAX arrays whose first axis counts examples. They are
            not copied: do not write to them while the data set is in use.
        batch_size: Examples in one batch: of all replicas together where the data set
            is distributed as it is, of one replica where a function with an
            `InputContext` returns it.
        shuffle_seed: Seed of the order. Every epoch has its own, which depends on the
            seed and the epoch alone. None keeps the order of the arrays.
        repeat: Whether the data set never ends. Batches then run across the ends of
            epochs, so that all are full and each epoch uses every example once.
        drop_remainder: Whether to leave out the last batch of an epoch if it is not
            full.

    Returns:
        A data set. Each pass over it is the next epoch. Positions count examples, so
        that one can be restored with another batch size.

    Raises:
        TypeError: If `arrays` has no leaf or a leaf is not an array of numbers.
        ValueError: If `batch_size` is not a positive integer, `shuffle_seed` is
            negative, or there is no example.
        BatchSizeError: If leading sizes differ, or `drop_remainder` leaves no batch.
    """
    return ArrayDataset(
        arrays,
        batch_size=batch_size,
        shuffle_seed=shuffle_seed,
        repeat=repeat,
        drop_remainder=drop_remainder,
    )


class ArrayDataset:
    """Rows of arrays in batches; made by `from_arrays`, which documents it."""

    name = "arrays"
    is_repositionable = True

    def __init__(
        self,
        arrays: PyTree,
        *,
        batch_size: int,
        shuffle_seed: int | None = None,
        repeat: bool = False,
        drop_remainder: bool = False,
    ) -> None:
        self.batch_size = check_positive_int("batch_size", batch_size)
        if shuffle_seed is not None:
            check_not_negative_int("shuffle_seed", shuffle_seed)
        self.arrays, self.num_examples = check_batch(arrays, lambda: "`arrays`")
        if not self.num_examples:
            raise ValueError(
                "`arrays` has 0 examples, but a data set needs at least one. Pass "
                "arrays with rows."
            )
        if drop_remainder and not repeat and self.batch_size > self.num_examples:
            raise BatchSizeError(
                f"`batch_size` is {self.batch_size}, but there are "
                f"{self.num_examples} examples, and `drop_remainder=True` leaves no "
                f"batch of them. Use `batch_size={self.num_examples}` or less, or "
                "`drop_remainder=False`."
            )
        self.shuffle_seed = shuffle_seed
        self.repeat = repeat
        self.drop_remainder = drop_remainder
        self._num_passes = 0

    @property
    def full_size(self) -> int:
        """Examples in every batch but perhaps the last."""
        if self.repeat:
            return self.batch_size
        return min(self.batch_size, self.num_examples)

    def make_iterator(self, epoch: int) -> "ArrayIterator":
        """Returns an iterator from the start of `epoch`."""
        return ArrayIterator(self, epoch)

    def __iter__(self) -> Iterator[Batch]:
        """Returns an iterator over the next epoch, for use without a strategy."""
        self._num_passes += 1
        return self.make_iterator(self._num_passes - 1)


class ArrayIterator:
    """Draws the rows of one batch after another.

    Args:
        dataset: Has the rows, and says in which order they come.
        epoch: The epoch to begin with.
    """

    def __init__(self, dataset: ArrayDataset, epoch: int) -> None:
        self._dataset = dataset
        self._epoch = epoch
        self._index = 0
        self._order = self._make_order()

    def __iter__(self) -> "ArrayIterator":
        return self

    def __next__(self) -> Batch:
        dataset = self._dataset
        num_left = dataset.num_examples - self._index
        if dataset.repeat:
            rows = self._take_repeated()
        elif num_left <= 0 or (
            dataset.drop_remainder and num_left < dataset.batch_size
        ):
            raise StopIteration
        else:
            rows = self._take(dataset.batch_size)
        return jax.tree.map(lambda array: np.take(array, rows, axis=0), dataset.arrays)

    def get_state(self) -> dict[str, int]:
        """Returns the epoch and how many of its examples were used."""
        return {
            "epoch": self._epoch,
            "index": self._index,
            "num_examples": self._dataset.num_examples,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position, also one of another batch size.

        Raises:
            DatasetStateError: If the position is not one in these arrays.
        """
        num_examples = self._dataset.num_examples
        if state["num_examples"] != num_examples:
            raise DatasetStateError(
                "`state` was saved from arrays of another size.\n"
                f"  in the state:   {state['num_examples']} examples\n"
                f"  in the program: {num_examples} examples\n"
                "Pass the arrays that the state was saved with."
            )
        if not 0 <= state["index"] <= num_examples or state["epoch"] < 0:
            raise DatasetStateError(
                f"`state` is {state!r}, but the epoch must not be negative and the "
                f"index must lie between 0 and {num_examples}. Pass what `get_state` "
                "returned."
            )
        self._epoch, self._index = state["epoch"], state["index"]
        self._order = self._make_order()

    def _make_order(self) -> np.ndarray:
        """Returns the rows of this epoch in order; called once per epoch."""
        num_examples, seed = self._dataset.num_examples, self._dataset.shuffle_seed
        if seed is None:
            return np.arange(num_examples)
        bits = np.random.PCG64([seed, self._epoch])
        return np.random.Generator(bits).permutation(num_examples)

    def _take(self, count: int) -> np.ndarray:
        rows = self._order[self._index : self._index + count]
        self._index += len(rows)
        return rows

    def _take_repeated(self) -> np.ndarray:
        parts: list[np.ndarray] = []
        num_missing = self._dataset.batch_size
        while num_missing:
            if self._index == self._dataset.num_examples:
                self._epoch, self._index = self._epoch + 1, 0
                self._order = self._make_order()
            parts.append(self._take(num_missing))
            num_missing -= len(parts[-1])
        return np.concatenate(parts)
