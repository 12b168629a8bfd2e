"""What counts as a batch: a pytree of arrays whose first axis counts examples."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from armillary._typing import Batch, PyTree
from armillary.errors import BatchSizeError


def check_batch(batch: Batch, get_name: Callable[[], str]) -> tuple[PyTree, int]:
    """Returns `batch` with NumPy leaves, and its number of examples.

    Args:
        batch: Pytree of NumPy or JAX arrays.
        get_name: Returns what the batch is called in messages.

    Raises:
        TypeError: If there is no leaf, or a leaf is not an array of numbers.
        BatchSizeError: If a leaf has no axis, or the leading sizes differ.
    """
    leaves, treedef = jax.tree.flatten(batch)
    num_rows = -1
    # One pass, since this runs for every batch: what is wrong is found out later.
    for leaf in leaves:
        shape = leaf.shape if _is_numeric_array(leaf) else ()
        if not shape or num_rows not in (-1, shape[0]):
            error = _find_problem(batch, leaves, get_name())
            raise error
        num_rows = shape[0]
    if not leaves:
        error = _find_problem(batch, leaves, get_name())
        raise error
    return jax.tree.unflatten(treedef, [np.asarray(leaf) for leaf in leaves]), num_rows


def _find_problem(batch: Batch, leaves: list[Any], name: str) -> Exception:
    """Returns the error that says why something is not a batch."""
    if not leaves:
        return TypeError(
            f"{name} is {batch!r}, which holds no array, but it must be a pytree of "
            "arrays. Return a dictionary or a tuple of NumPy arrays."
        )
    if not all(_is_numeric_array(leaf) for leaf in leaves):
        return TypeError(_describe_non_arrays(batch, name))
    if not all(np.ndim(leaf) for leaf in leaves):
        paths = [path for path, leaf in _named_leaves(batch) if not np.ndim(leaf)]
        return BatchSizeError(
            f"{name} has leaves without a batch axis: {', '.join(paths)}. Every leaf "
            "needs the examples on its first axis. Batch the data set, or repeat the "
            "value for every example, as in `np.full(batch_size, value)`."
        )
    sizes = "\n".join(
        f"  {path}: {leaf.shape[0]} examples, shape {leaf.shape}"
        for path, leaf in _named_leaves(batch)
    )
    return BatchSizeError(
        f"{name} has leaves of different leading sizes, but the first axis of all "
        f"must count the same examples:\n{sizes}\nGive all leaves one size."
    )


def canonical_dtype(leaf: Any) -> np.dtype:
    """Returns the dtype that `leaf` has on a device (int64 is int32 there)."""
    return np.dtype(jax.dtypes.canonicalize_dtype(leaf.dtype))


def get_signature(arrays: PyTree) -> Hashable:
    """Returns a key that is equal for batches which one program can take."""
    leaves, treedef = jax.tree.flatten(arrays)
    return treedef, tuple((leaf.shape, canonical_dtype(leaf)) for leaf in leaves)


def describe_shapes(arrays: PyTree) -> str:
    """Returns the paths, dtypes and shapes of all leaves, in one line."""
    return ", ".join(
        f"{path}: {canonical_dtype(leaf)} {leaf.shape}"
        for path, leaf in _named_leaves(arrays)
    )


def _is_numeric_array(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray | np.generic):
        # Kind "V" holds structured types, and also bfloat16 and its relatives.
        return leaf.dtype.kind in "biufc" or jax.dtypes.issubdtype(
            leaf.dtype, np.number
        )
    return isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def _named_leaves(batch: PyTree) -> list[tuple[str, Any]]:
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/") or "(root)", leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]
    ]


def _describe_non_arrays(batch: PyTree, name: str) -> str:
    found = "\n".join(
        f"  {path}: {_describe_type(leaf)}"
        for path, leaf in _named_leaves(batch)
        if not _is_numeric_array(leaf)
    )
    return (
        f"{name} has leaves that are not arrays of numbers, but every leaf must be a "
        f"NumPy or JAX array with the examples on its first axis:\n{found}\n"
        "Convert them in the data set, as in `np.asarray(values)`, or leave them out."
    )


def _describe_type(leaf: Any) -> str:
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None:
        return f"{type(leaf).__name__} of dtype {dtype}"
    return f"{type(leaf).__name__} {leaf!r:.40}"
