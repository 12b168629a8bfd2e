"""Random-access (map-style) data of the user, such as files of images."""

import contextlib
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from armillary._checks import check_positive_int
from armillary.data.sources._arrays import IndexedDataset, fingerprint
from armillary.data.sources._batch import as_numpy, check_batch
from armillary.data.sources._examples import (
    count_examples,
    find_fingerprints,
    read_examples,
)
from armillary.data.sources._take import check_rows
from armillary.typing import Batch, PyTree

_MAX_READ = 16
"""The number of examples that a fingerprint reads."""
_AT_ONCE = 64
"""The number of examples to ask `__getitems__` for."""
_THREADS = "armillary-rows"


def from_random_access(
    source: Any,
    *,
    batch_size: int,
    shuffle_seed: int | None = None,
    repeat: bool = False,
    drop_remainder: bool = False,
    num_threads: int = 1,
) -> "RandomAccessDataset":
    """Returns a dataset of the examples of `source`, in batches.

    `source[number]` is one example: a pytree of arrays and numbers, without a batch
    axis. In a job of several processes, each process reads only the examples of its own
    devices. So `source[number]` must depend only on the number: draw random numbers
    from a seed and the number. `docs/data/libraries.md` has an example.

    Args:
        source: An object with `__len__` and `__getitem__`, such as a map-style dataset
            of PyTorch or a data source of Grain. If it has `__getitems__`, this is
            called with a list of numbers, and returns a list of examples. All examples
            must have the same structure, shapes and dtypes.
        batch_size: As in `from_arrays`, like the arguments below.
        shuffle_seed: Seed of the order.
        repeat: Whether the dataset never ends.
        drop_remainder: Whether to leave out a last batch that is not full.
        num_threads: Threads that call `source` for one batch. More than one helps if
            examples come from a disk or a network. `source` must then allow calls from
            several threads.

    Returns:
        A dataset with the order, the passes and the positions of `from_arrays`.

    Raises:
        TypeError: If `source` has no length or no examples by number, or an example is
            not a pytree of arrays and numbers.
        ValueError: If there is no example, or another argument is wrong.
        BatchSizeError: If `drop_remainder` leaves no batch.
    """
    return RandomAccessDataset(
        source,
        batch_size,
        shuffle_seed,
        repeat,
        drop_remainder,
        num_threads=num_threads,
    )


class RandomAccessDataset(IndexedDataset):
    """Examples in batches; made by `from_random_access`, which documents it."""

    name = "random access"
    argument = "source"

    def __init__(
        self,
        source: Any,
        *options: Any,
        num_threads: int = 1,
        argument: str | None = None,
    ) -> None:
        self._source = source
        self.argument = argument or self.argument
        self._num_threads = check_positive_int("num_threads", num_threads)
        # Several passes, and a save that compares the examples, read the same source.
        self._one_thread = contextlib.nullcontext() if num_threads > 1 else _OneThread()
        super().__init__(self.argument, self._count(source), *options)
        # One read finds examples that no device can hold before the program runs.
        self.row_types = self._read_types()

    def _count(self, source: Any) -> int:
        return count_examples(source, self.argument)

    def _read_types(self) -> PyTree:
        first = self._read([0])[0]
        example = jax.tree.map(_as_array, first)
        self._check_example(0, example)

        def type_of(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

        return jax.tree.map(type_of, example)

    def _check_example(self, number: int, example: PyTree) -> None:
        batch = jax.tree.map(lambda leaf: leaf[np.newaxis], example)
        name = f"Example {number} of `{self.argument}`, as a batch,"
        check_batch(batch, lambda: name)

    def read_rows(self, rows: np.ndarray) -> Batch:
        """Returns these examples.

        Raises:
            TypeError: If an example does not have the types of the first example, or
                has masked values.
        """
        types, structure = jax.tree.flatten(self.row_types)
        expected = [(row.shape, row.dtype) for row in types]
        columns = [np.empty((len(rows), *row.shape), row.dtype) for row in types]
        numbers: list[int] = rows.tolist()
        start = 0
        for some in self._read_parts(numbers):
            for place, example in enumerate(some, start):
                leaves, found = jax.tree.flatten(example)
                leaves = [_as_array(leaf) for leaf in leaves]
                kinds = [(leaf.shape, leaf.dtype) for leaf in leaves]
                if found != structure or kinds != expected:
                    name = f"Example {numbers[place]} of `{self.argument}`"
                    example = found.unflatten(leaves)
                    check_rows(example, self.row_types, lambda name=name: name, 0)
                if any(map(np.ma.is_masked, leaves)):
                    # The types are equal, but a copy has the values under the mask.
                    self._check_example(numbers[place], found.unflatten(leaves))
                for column, leaf in zip(columns, leaves, strict=True):
                    column[place] = leaf
            start += len(some)
        return structure.unflatten(columns)

    def _read_parts(self, numbers: list[int]) -> Iterable[Sequence[PyTree]]:
        """Yields examples in order, some at a time."""
        has_many = callable(getattr(self._source, "__getitems__", None))
        size = _AT_ONCE if has_many else 1
        if self._num_threads > 1:
            # Each thread gets a part, even of a small batch.
            size_per_thread = -(-len(numbers) // self._num_threads)  # rounded up
            size = min(size, size_per_thread)
        parts = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        if self._num_threads == 1 or len(parts) == 1:
            yield from map(self._read, parts)
            return
        # Made for each batch, because a dataset may be copied, and sent to a process.
        with ThreadPoolExecutor(self._num_threads, _THREADS) as threads:
            yield from threads.map(self._read, parts)

    def _read(self, numbers: list[int]) -> Sequence[PyTree]:
        """Returns the examples of a few numbers.

        Raises:
            TypeError: If one is missing.
        """
        with self._one_thread:
            examples = read_examples(self._source, numbers, self.argument)
        for number, example in zip(numbers, examples, strict=True):
            if example is None:
                raise TypeError(
                    f"Example {number} of `{self.argument}` is None, but each number "
                    "must have an example. In place of `filter` of Grain, which leaves "
                    "gaps, use `armillary.data.select(source, keep)`, which gives the "
                    "kept examples new numbers."
                )
        return examples

    def fingerprints(self) -> dict[str, str]:
        """Returns a checksum of some examples, if they are the same in each read."""
        first = self._fingerprint_rows()
        second = self._fingerprint_rows()
        made = find_fingerprints(self._source)
        # Examples with random changes are different in another process, too.
        is_same = first == second
        return {"rows": first, **made} if is_same else made

    def _fingerprint_rows(self) -> str:
        rows = self.read_rows(self.spaced_rows(_MAX_READ))
        return fingerprint(*jax.tree.leaves(rows))


class _OneThread:
    """A lock of a dataset; a deep copy, or a copy in a process, has a lock of its own.

    The source is copied with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return _OneThread, ()


def _as_array(leaf: Any) -> np.ndarray:
    return np.asanyarray(as_numpy(leaf))
