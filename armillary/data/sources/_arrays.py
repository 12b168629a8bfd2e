"""Arrays in memory as a source."""

from typing import Any

import jax
import numpy as np

from armillary.data.sources._batch import check_batch
from armillary.data.sources._indexed import IndexedDataset, fingerprint
from armillary.typing import Batch, PyTree

_MOST_BYTES = 2**28
"""Arrays up to this size are seen whole by a fingerprint, in a tenth of a second."""
_MOST_ROWS = 1024


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
        TypeError: If `arrays` has no leaf or a leaf is not an array of numbers, or
            `repeat` or `drop_remainder` is neither True nor False.
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


class ArrayDataset(IndexedDataset):
    """Rows of arrays in batches; made by `from_arrays`, which documents it."""

    name = "arrays"

    def __init__(self, arrays: PyTree, **options: Any) -> None:
        self.arrays, num_examples = check_batch(arrays, lambda: "`arrays`")
        if not num_examples:
            raise ValueError(
                "`arrays` has 0 examples, but a data set needs at least one. Pass "
                "arrays with rows."
            )
        super().__init__(num_examples, **options)

    def read_rows(self, rows: np.ndarray) -> Batch:
        """Returns these rows of all arrays, copied."""
        return jax.tree.map(lambda array: np.take(array, rows, axis=0), self.arrays)

    def fingerprints(self) -> dict[str, str]:
        """Returns the dtype, shape and checksum of each array, by its path.

        Of large arrays, some rows are seen.
        """
        found: dict[str, str] = {}
        for path, array in jax.tree_util.tree_leaves_with_path(self.arrays):
            name = f"array {jax.tree_util.keystr(path, simple=True, separator='/')}"
            rows = array
            if array.nbytes > _MOST_BYTES:
                rows = np.take(array, self.spaced_rows(_MOST_ROWS), axis=0)
            shown = f"{array.dtype} {array.shape} {fingerprint(rows)}"
            found[name.strip()] = shown
        return found
