"""Reads the rows of batches by number: each once, and in parts of bounded size."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from armillary._checks import list_lines
from armillary.data.sources._batch import named_leaves
from armillary.typing import Batch, PyTree

NO_ROW = -1
"""The number of a row that no step uses."""
_ALIGNMENT_BYTES = 64
_MAX_LISTED = 10


def take_rows(
    read_rows: Callable[[np.ndarray], Batch],
    numbers: np.ndarray,
    batches: np.ndarray,
    *,
    types: PyTree,
    rows_at_once: int,
    argument: str,
) -> PyTree:
    """Returns the rows of some numbers, with leaves of shape `(len(numbers), ...)`.

    A batch may hold a row several times, because replicas without data, padding and
    devices with the same examples repeat rows. It is read once for the batch.

    Args:
        read_rows: Returns the rows of a list of numbers.
        numbers: The numbers; the rows of `NO_ROW` become zeros.
        batches: For each row, the number of its batch.
        types: The types of a row.
        rows_at_once: The number of rows to read together.
        argument: The argument with the data, for messages.

    Raises:
        TypeError: If a row has other types.
    """
    numbers = numbers.astype(np.int64)
    rows = jax.tree.map(
        lambda row: empty_aligned((len(numbers), *row.shape), row.dtype), types
    )
    targets: list[np.ndarray] = jax.tree.leaves(rows)

    # One key for each pair of a batch and a row in it.
    used = np.flatnonzero(numbers != NO_ROW)
    most = numbers.max(initial=0) + 1
    keys = batches[used] * most + numbers[used]
    _, first, same = np.unique(keys, return_index=True, return_inverse=True)

    places = used[np.sort(first)]
    for start in range(0, len(places), rows_at_once):
        some = places[start : start + rows_at_once]
        part = read_rows(numbers[some])
        check_rows(part, types, lambda some=some: name_rows(argument, numbers[some]))
        for target, leaf in zip(targets, jax.tree.leaves(part), strict=True):
            target[some] = leaf

    # The rows that were not read are copies of rows that were, or not used at all.
    originals = used[first[same]]
    copies = np.flatnonzero(originals != used)
    unused = np.flatnonzero(numbers == NO_ROW)
    for target in targets:
        target[used[copies]] = target[originals[copies]]
        target[unused] = 0
    return rows


def name_rows(argument: str, numbers: np.ndarray) -> str:
    """Returns a text for some examples of an argument."""
    first = numbers.min()
    last = numbers.max()
    if first == last:
        return f"Example {first} of `{argument}`"
    return f"An example of the numbers {first} to {last} of `{argument}`"


def check_rows(
    batch: Batch,
    types: PyTree,
    get_name: Callable[[], str],
    num_axes: int = 1,
) -> None:
    """Raises if the rows of a batch do not have the types of the first example.

    Args:
        batch: The rows.
        types: The types of the first example.
        get_name: Returns the name of the rows, for the message.
        num_axes: The number of axes in front of each row.

    Raises:
        TypeError: If structure, shapes or dtypes are different.
    """
    if _have_types(batch, types, num_axes):
        return
    found = _describe(batch, num_axes)
    expected = _describe(types, 0)
    lines: list[str] = []
    for path in {**expected, **found}:
        now = found.get(path, "missing")
        before = expected.get(path, "missing")
        if now != before:
            lines.append(f"{path}: {now}, but {before} in example 0")
    if not lines:
        lines = [f"{jax.tree.structure(batch)}, but {jax.tree.structure(types)}"]
    raise TypeError(
        f"{get_name()} has other types than example 0, but all examples must have the "
        "same structure, shapes and dtypes:\n"
        f"{list_lines(lines, _MAX_LISTED)}\n"
        "Convert the examples in the dataset: pad lists to one length, and give "
        "numbers a dtype, as in `np.asarray(value, np.float32)`."
    )


def _have_types(rows: PyTree, types: PyTree, num_axes: int) -> bool:
    # Without texts, because it runs for each read.
    leaves, found = jax.tree.flatten(rows)
    expected, structure = jax.tree.flatten(types)
    if found != structure:
        return False
    return all(
        leaf.shape[num_axes:] == row.shape and leaf.dtype == row.dtype
        for leaf, row in zip(leaves, expected, strict=True)
    )


def _describe(rows: PyTree, num_axes: int) -> dict[str, str]:
    """Returns the dtype and the shape of each leaf of a row, by path."""
    described: dict[str, str] = {}
    for path, leaf in named_leaves(rows):
        row_shape = leaf.shape[num_axes:]
        described[path] = f"{leaf.dtype} {row_shape}"
    return described


def empty_aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns an array whose memory XLA's CPU client can share.

    Do not write to it after it was given to JAX.
    """
    dtype = np.dtype(dtype)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
