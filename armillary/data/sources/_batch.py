"""The definition of a batch: a pytree of arrays whose first axis counts examples."""

import os
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from armillary._checks import list_lines
from armillary.errors import BatchSizeError
from armillary.typing import Batch, PyTree

_MAX_LISTED = 10
_ROWS = (
    "A list of rows becomes an array for each column: "
    "`{name: np.array([float(row[name]) for row in rows]) for name in names}`."
)


def check_batch(batch: Batch, get_name: Callable[[], str]) -> tuple[PyTree, int]:
    """Returns `batch` with NumPy leaves, and its number of examples."""
    leaves, treedef = jax.tree.flatten(batch)
    leaves = [as_numpy(leaf) for leaf in leaves]
    num_rows = -1
    # One pass, because this runs for every batch. `_find_problem` looks more closely.
    for leaf in leaves:
        shape = leaf.shape if _is_numeric(leaf) else ()
        if not shape or num_rows not in (-1, shape[0]):
            error = _find_problem(treedef.unflatten(leaves), get_name())
            raise error
        num_rows = shape[0]
    if not leaves:
        raise TypeError(
            f"{get_name()} is {batch!r}, which holds no array, but it must be a pytree "
            "of arrays. Return a dictionary or a tuple of NumPy arrays. A step that "
            "makes its own data needs no dataset (`train_dataset=None`)."
        )
    return treedef.unflatten(np.asarray(leaf) for leaf in leaves), num_rows


def as_numpy(leaf: Any) -> Any:
    """Converts an array of another library to NumPy; other values are unchanged."""
    is_known = isinstance(leaf, np.ndarray | np.generic | jax.Array)
    return leaf if is_known or not hasattr(leaf, "__array__") else np.asarray(leaf)


def _is_numeric(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if not isinstance(leaf, np.ndarray | np.generic):
        return False
    # A device has no mask, and no extended precision (g, G).
    if np.ma.is_masked(leaf) or leaf.dtype.char in "gG":
        return False
    # Kind "V" includes structured types, and also types such as bfloat16.
    kind = leaf.dtype.kind
    return kind in "biufc" or jax.dtypes.issubdtype(leaf.dtype, np.number)


def _find_problem(batch: Batch, name: str) -> Exception:
    """Returns the error for the first rule that a refused batch breaks."""
    named = named_leaves(batch)
    wrong: list[str] = []
    fixes: list[str] = []
    for path, leaf in named:
        if _is_numeric(leaf):
            continue
        shown = f"of dtype {leaf.dtype}" if hasattr(leaf, "dtype") else f"{leaf!r:.40}"
        wrong.append(f"{path}: {type(leaf).__name__} {shown}")
        fixes.append(_find_fix(leaf))
    if wrong:
        is_table = isinstance(batch, list) and isinstance(batch[0], dict)
        fix = _ROWS if is_table else " ".join(dict.fromkeys(fixes))
        return TypeError(
            f"{name} has leaves that are not arrays of numbers, but every leaf must be "
            f"an array with the examples on its first axis:\n{_list(wrong)}\n"
            f"{fix} Or leave them out."
        )
    flat = [path for path, leaf in named if not np.ndim(leaf)]
    if flat:
        return BatchSizeError(
            f"{name} has leaves without a batch axis, but the first axis of all must "
            f"count the examples:\n{_list(flat)}\nBatch the dataset, or repeat the "
            "value for every example, as in `np.full(batch_size, value)`."
        )

    lines: dict[int, str] = {}  # One for each size.
    for path, leaf in named:
        line = f"{path}: {leaf.shape[0]} examples, shape {leaf.shape}"
        lines.setdefault(leaf.shape[0], line)
    return BatchSizeError(
        f"{name} has leaves of different leading sizes, but the first axis of all "
        f"must count the same examples:\n{_list([*lines.values()])}\n"
        "Give all leaves one size. Examples without a common size, such as graphs, are "
        "padded to one shape and stacked (`np.stack`), so that each is one row."
    )


def _find_fix(leaf: Any) -> str:
    """Returns the line that makes numbers of a leaf that has none."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.names:
        return (
            "A structured array becomes a dictionary of its columns: "
            "`{name: rows[name] for name in rows.dtype.names}`."
        )
    if isinstance(leaf, os.PathLike) or (isinstance(leaf, str) and _is_file(leaf)):
        return (
            "Read a file into arrays first: write `dict(pandas.read_csv(path))` for "
            "the columns of a CSV file, or `np.load(path)`."
        )
    values = leaf.flat if isinstance(leaf, np.ndarray) else [leaf]
    if isinstance(next(iter(values), None), str):
        return (
            "Text becomes numbers by `np.unique(values, return_inverse=True)[1]`, or "
            "by `values.astype(np.float32)` if it spells numbers."
        )
    return (
        "Convert them in the dataset, as in `np.asarray(values)` (a masked array by "
        "`values.filled(0)`)."
    )


def _is_file(text: str) -> bool:
    try:
        return os.path.isfile(text)
    except ValueError:  # Text with a NUL is not a path.
        return False


def is_nest_of_arrays(value: Any) -> bool:
    """Returns whether a value is an array, or a dictionary or tuple of arrays."""
    if isinstance(value, dict | np.ndarray | jax.Array):
        return True
    if not isinstance(value, tuple) or not value:
        return False
    return all(isinstance(part, np.ndarray | jax.Array) for part in value)


def canonical_dtype(leaf: Any) -> np.dtype:
    """Returns the dtype that `leaf` has on a device (int64 is int32 there)."""
    # Files from other machines may have a different byte order.
    return np.dtype(jax.dtypes.canonicalize_dtype(leaf.dtype.newbyteorder("=")))


def as_device_values(
    arrays: PyTree, get_name: Callable[[], str], numbers: np.ndarray | None = None
) -> PyTree:
    """Returns NumPy arrays with a device's dtypes.

    `numbers` has the number of each example, for messages.
    """
    try:
        return jax.tree.map(_narrow, arrays)
    except (OverflowError, FloatingPointError):
        lines = _list(_find_misfits(arrays, numbers))
        raise ValueError(
            f"{get_name()} has numbers of 64 bits that do not fit into the 32 bits "
            f"which they have on a device:\n{lines}\nKeep them on the host, and give "
            "the step numbers that fit, such as row numbers instead of ids. Or use 64 "
            'bits on devices: `jax.config.update("jax_enable_x64", True)`.'
        ) from None


def _narrow(leaf: Any) -> Any:
    """Returns an array in the dtype of a device, or raises if a value does not fit."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    dtype = canonical_dtype(leaf)
    if leaf.dtype == dtype:
        return leaf
    if dtype.kind not in "iu":
        with np.errstate(over="raise"):
            return leaf.astype(dtype)
    limits = np.iinfo(dtype)
    # NumPy cuts integers without an error.
    if leaf.size and not limits.min <= leaf.min() <= leaf.max() <= limits.max:
        raise OverflowError
    return leaf.astype(dtype)


def _find_misfits(arrays: PyTree, numbers: np.ndarray | None) -> list[str]:
    """Returns a line for each leaf with a value that a device cannot hold."""
    lines: list[str] = []
    for path, leaf in named_leaves(arrays):
        if not isinstance(leaf, np.ndarray):
            continue
        dtype = canonical_dtype(leaf)
        with np.errstate(over="ignore"):
            narrow = leaf.astype(dtype)
        is_exact = dtype.kind not in "iu" or narrow == leaf
        stays_finite = np.isfinite(narrow) | ~np.isfinite(leaf)
        wrong = np.argwhere(~(is_exact & stays_finite))
        if len(wrong):
            place = tuple(wrong[0])
            example = place[0] if numbers is None else numbers[place[: numbers.ndim]]
            lines.append(
                f"{path}: {leaf[place]} in example {example}, {leaf.dtype} that "
                f"becomes {dtype}"
            )
    return lines


def get_signature(arrays: PyTree) -> Hashable:
    """Returns a key that is equal for batches which one program can take."""
    leaves, treedef = jax.tree.flatten(arrays)
    return treedef, tuple((leaf.shape, canonical_dtype(leaf)) for leaf in leaves)


def describe_shapes(arrays: PyTree) -> str:
    """Returns the paths, dtypes and shapes of the first leaves, in one line."""
    shapes = [
        f"{path}: {canonical_dtype(leaf)} {leaf.shape}"
        for path, leaf in named_leaves(arrays)
    ]
    lines = _list(shapes).splitlines()
    return ", ".join(line.strip() for line in lines)


def show_path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "(root)"


def named_leaves(batch: PyTree) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return [(show_path(path), leaf) for path, leaf in leaves]


def _list(lines: list[str]) -> str:
    return list_lines(lines, _MAX_LISTED)
