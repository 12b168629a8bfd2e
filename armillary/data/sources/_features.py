"""The features that a program reads from `tf.train.Example` messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from armillary._checks import is_positive_int

DTYPES_BY_LIST = {
    "bytes_list": "bytes",
    "float_list": "np.float32",
    "int64_list": "np.int64",
}
"""The lists that a message stores values in, and a dtype that fits each."""


@dataclass(frozen=True, eq=False)
class FixedLenFeature:
    """A feature that has the same number of values in every record.

    Args:
        shape: Shape of one example; `()` for one value.
        dtype: The dtype in the batch. Integers and floats may be narrower than in the
            file (`np.int32`), but a value that does not fit is an error. If a feature
            was written as bytes, with `array.tobytes()`, use the dtype of the array.
            `bytes` keeps byte strings, in arrays of objects.
        default_value: The value for records without the feature: one value, or one for
            each element. With None, such records are an error.

    Raises:
        ValueError: If `shape` is not a shape, or `default_value` does not fit.
        TypeError: If `dtype` is not a dtype of numbers or bytes.
    """

    shape: Sequence[int]
    dtype: Any
    default_value: Any = None

    def __post_init__(self) -> None:
        shape = self.shape
        if not isinstance(shape, list | tuple) or not all(map(is_positive_int, shape)):
            raise ValueError(
                f"`shape` is {shape!r}, but it must be a tuple of positive integers. "
                "Use `shape=()` for one value in each example."
            )
        try:
            dtype = np.dtype(self.dtype)
        except (TypeError, ValueError, SyntaxError):
            dtype = np.dtype("V")  # Neither numbers nor bytes.
        if self.dtype is None or list_for(dtype) is None:
            raise TypeError(
                f"`dtype` is {self.dtype!r}, but a feature holds numbers or bytes. Use "
                "a dtype such as `np.int64`, `np.float32` or `bytes`."
            )
        if dtype.kind == "S":
            dtype = np.dtype("O")

        default = self.default_value
        if default is not None:
            try:
                default = _as_default(default, dtype)
                default = default.reshape(shape if default.size > 1 else ())
                default = np.broadcast_to(default, shape)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(
                    f"`default_value` is {self.default_value!r:.80}, but the feature "
                    f"has the dtype {dtype} and the shape {shape}: {error}."
                ) from error
        vars(self).update(shape=tuple(shape), dtype=dtype, default_value=default)


def list_for(dtype: np.dtype) -> str | None:
    """Returns the list of values that fits a dtype, or `None`."""
    if dtype.kind in "biu":
        return "int64_list"
    if dtype.kind in "SO":
        return "bytes_list"
    # By JAX, because NumPy does not count types such as bfloat16 as floats.
    return "float_list" if jax.dtypes.issubdtype(dtype, np.floating) else None


def convert(values: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns numbers in another dtype, and which of them it can hold.

    Floats may be rounded, but not become infinite.
    """
    # A signaling NaN is allowed, too.
    with np.errstate(invalid="ignore", over="ignore"):
        made = values.astype(dtype, copy=False)
    if values.dtype.kind in "biu" or dtype.kind in "biu":
        return made, made == values
    if values.dtype == dtype:
        return made, np.ones(values.shape, bool)
    return made, np.isfinite(made) | ~np.isfinite(values)


def _as_default(value: Any, dtype: np.dtype) -> np.ndarray:
    """Returns a default value in the dtype of its feature, which must hold it."""
    written = np.asarray(value)
    if dtype.kind == "O" or written.dtype.kind in "OSU":
        return np.asarray(value, dtype)
    made, fits = convert(written, dtype)
    if not fits.all():
        raise ValueError(f"{dtype} cannot hold {written[~fits][0]}")
    return made


def check_features(features: Any) -> dict[str, FixedLenFeature]:
    is_named = isinstance(features, Mapping) and len(features) > 0
    values = features.values() if is_named else ()
    if not is_named or not all(isinstance(value, FixedLenFeature) for value in values):
        raise TypeError(
            f"`features` is {features!r:.200}, but it must be a dictionary of at least "
            "one `armillary.data.FixedLenFeature`. Use `features={'label': "
            "armillary.data.FixedLenFeature((), np.int64)}`."
        )
    return dict(features)
