"""The definition of a batch: a pytree of arrays whose first axis counts examples."""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from armillary.errors import BatchSizeError
from armillary.typing import Batch, PyTree

_MOST_LISTED = 10


def check_batch(batch: Batch, get_name: Callable[[], str]) -> tuple[PyTree, int]:
    """Returns `batch` with NumPy leaves, and its number of examples."""
    leaves, treedef = jax.tree.flatten(batch)
    leaves = [as_array(leaf) for leaf in leaves]
    num_rows = -1
    # One pass, since this runs for every batch: what is wrong is found out later.
    for leaf in leaves:
        shape = leaf.shape if _is_numeric_array(leaf) else ()
        if not shape or num_rows not in (-1, shape[0]):
            error = _find_problem(treedef.unflatten(leaves), leaves, get_name())
            raise error
        num_rows = shape[0]
    if not leaves:
        error = _find_problem(batch, leaves, get_name())
        raise error
    return treedef.unflatten(np.asarray(leaf) for leaf in leaves), num_rows


def as_array(leaf: Any) -> Any:
    """Returns an array of another library as a NumPy array, and anything else as is."""
    is_foreign = not isinstance(leaf, np.ndarray | np.generic | jax.Array)
    if is_foreign and hasattr(leaf, "__array__"):
        try:
            return np.asarray(leaf)
        except (TypeError, ValueError, RuntimeError):
            pass  # Such as a tensor on a GPU: the message shows it as it is.
    return leaf


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
            f"{name} has leaves without a batch axis: {', '.join(_first(paths))}. "
            "Every leaf needs the examples on its first axis. Batch the data set, or "
            "repeat the value for every example, as in `np.full(batch_size, value)`."
        )
    counts = Counter(leaf.shape[0] for leaf in leaves)
    sizes = [
        f"  {path}: {leaf.shape[0]} examples, shape {leaf.shape}"
        # Of many leaves, those of a rare size are the ones to see.
        for path, leaf in sorted(
            _named_leaves(batch), key=lambda named: counts[named[1].shape[0]]
        )
    ]
    shown = "\n".join(_first(sizes))
    return BatchSizeError(
        f"{name} has leaves of different leading sizes, but the first axis of all "
        f"must count the same examples:\n{shown}\nGive all leaves one size."
    )


def canonical_dtype(leaf: Any) -> np.dtype:
    """Returns the dtype that `leaf` has on a device (int64 is int32 there)."""
    return np.dtype(jax.dtypes.canonicalize_dtype(leaf.dtype))


def as_device_values(
    arrays: PyTree, get_name: Callable[[], str], numbers: np.ndarray | None = None
) -> PyTree:
    """Returns NumPy arrays with the dtypes that they have on a device.

    Args:
        arrays: The arrays; whatever else is among them stays as it is.
        get_name: Returns what a message calls them.
        numbers: The numbers of their examples, in the shape of the first axes; without
            them they are counted from 0.

    Raises:
        ValueError: If a value does not fit.
    """
    try:
        return jax.tree.map(_narrow, arrays)
    except (OverflowError, FloatingPointError):
        raise ValueError(_describe_misfits(arrays, get_name(), numbers)) from None


def _narrow(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray) or leaf.dtype == (
        dtype := canonical_dtype(leaf)
    ):
        return leaf
    if dtype.kind not in "iu":
        with np.errstate(over="raise"):
            return leaf.astype(dtype)
    limits = np.iinfo(dtype)
    # Of integers, NumPy does not say that one was cut.
    if leaf.size and not limits.min <= leaf.min() <= leaf.max() <= limits.max:
        raise OverflowError
    return leaf.astype(dtype)


def _describe_misfits(arrays: PyTree, name: str, numbers: np.ndarray | None) -> str:
    lines: list[str] = []
    for path, leaf in _named_leaves(arrays):
        if not isinstance(leaf, np.ndarray):
            continue
        dtype = canonical_dtype(leaf)
        with np.errstate(over="ignore"):
            narrow = leaf.astype(dtype)
        is_exact = dtype.kind not in "iu" or narrow == leaf
        wrong = np.argwhere(~(is_exact & (np.isfinite(narrow) | ~np.isfinite(leaf))))
        if len(wrong):
            place = tuple(wrong[0])
            example = place[0] if numbers is None else numbers[place[: numbers.ndim]]
            lines.append(
                f"  {path}: {leaf[place]} in example {example}, {leaf.dtype} that "
                f"becomes {dtype}"
            )
    shown = "\n".join(_first(lines))
    return (
        f"{name} has numbers of 64 bits that do not fit into the 32 bits which they "
        f"have on a device:\n{shown}\nKeep them on the host and give the step what "
        "fits, such as the number of the row in place of an id, or let devices have "
        '64 bits: `jax.config.update("jax_enable_x64", True)`.'
    )


def get_signature(arrays: PyTree) -> Hashable:
    """Returns a key that is equal for batches which one program can take."""
    leaves, treedef = jax.tree.flatten(arrays)
    return treedef, tuple((leaf.shape, canonical_dtype(leaf)) for leaf in leaves)


def describe_shapes(arrays: PyTree) -> str:
    """Returns the paths, dtypes and shapes of the first leaves, in one line."""
    shapes = [
        f"{path}: {canonical_dtype(leaf)} {leaf.shape}"
        for path, leaf in _named_leaves(arrays)
    ]
    return ", ".join(_first(shapes))


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
    """Returns the leaves with their paths; a list of numbers is shown as one."""
    leaves = jax.tree_util.tree_flatten_with_path(batch, is_leaf=_is_list_of_numbers)
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/") or "(root)", leaf)
        for path, leaf in leaves[0]
    ]


def _is_list_of_numbers(value: Any) -> bool:
    leaves = jax.tree.leaves(value) if isinstance(value, list) else []
    return bool(leaves) and all(isinstance(leaf, int | float) for leaf in leaves)


def _first(items: list[str]) -> list[str]:
    """Returns the first items, and one that says how many there are besides."""
    num_hidden = len(items) - _MOST_LISTED
    return items if num_hidden < 1 else [*items[:-num_hidden], f"and {num_hidden} more"]


def _describe_non_arrays(batch: PyTree, name: str) -> str:
    found = [
        f"  {path}: {_describe_type(leaf)}"
        for path, leaf in _named_leaves(batch)
        if not _is_numeric_array(leaf)
    ]
    shown = "\n".join(_first(found))
    return (
        f"{name} has leaves that are not arrays of numbers, but every leaf must be an "
        f"array with the examples on its first axis:\n{shown}\n"
        "Convert them in the data set, as in `np.asarray(values)`, or leave them out."
    )


def _describe_type(leaf: Any) -> str:
    if isinstance(leaf, list):
        kinds = sorted({type(item).__name__ for item in leaf})
        return f"list of {len(leaf)} x {' or '.join(kinds)}"
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None:
        return f"{type(leaf).__name__} of dtype {dtype}{_find_reason(leaf)}"
    return f"{type(leaf).__name__} {leaf!r:.40}"


def _find_reason(leaf: Any) -> str:
    """Returns why NumPy cannot take an array of another library, or nothing."""
    if isinstance(leaf, jax.Array) or not hasattr(leaf, "__array__"):
        return ""
    try:
        np.asarray(leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        return f" ({error})"
    return ""
