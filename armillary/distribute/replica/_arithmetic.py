"""The dtypes of reductions over replicas, and values that do not change a result."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.dtypes import float0

from armillary.distribute.replica._values import ReduceOp

_EXTREMES = (ReduceOp.MAX, ReduceOp.MIN)
_ALONG_AXIS = {
    ReduceOp.SUM: jnp.sum,
    ReduceOp.MEAN: jnp.mean,
    ReduceOp.MAX: jnp.max,
    ReduceOp.MIN: jnp.min,
}


def check_wire_dtype(dtype: Any) -> Any:
    """Returns the dtype in which floats travel; `None` for their own dtype."""
    if dtype is None:
        return None
    with contextlib.suppress(TypeError):
        if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return jnp.dtype(dtype)
    raise ValueError(
        f"`dtype` is {dtype!r}, but values travel between replicas in a dtype of "
        "floats. Use `dtype=jnp.bfloat16`, or leave it out for the dtype of each value."
    )


def to_wire(value: jax.Array, dtype: Any) -> jax.Array:
    """Returns a value in the dtype in which floats travel."""
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    if dtype is None or not is_float:
        return value
    return value.astype(dtype)


def widen(op: ReduceOp, value: jax.Array) -> jax.Array:
    """Returns a value in a wider dtype, if its sum could soon overflow."""
    if value.dtype == bool:
        return value.astype(int)
    if op is not ReduceOp.MEAN:
        return value
    if value.dtype == jnp.float16:
        return value.astype(jnp.float32)
    is_small = jnp.issubdtype(value.dtype, jnp.integer) and value.dtype.itemsize < 4
    return value.astype(int) if is_small else value


def narrow(op: ReduceOp, result: jax.Array, dtype: Any) -> jax.Array:
    """Returns a result in the dtype of the values, except for counts and quotients."""
    is_kept = op in _EXTREMES or dtype == jnp.float16
    return result.astype(dtype) if is_kept else result


def neutral(op: ReduceOp, value: jax.Array) -> jax.Array:
    """Returns an array like `value` that does not change the result of a reduction."""
    if op not in _EXTREMES:
        return jnp.zeros_like(value)

    least = -jnp.inf
    most = jnp.inf
    is_integer = not jnp.issubdtype(value.dtype, jnp.inexact)
    if is_integer:
        limits = jnp.iinfo(value.dtype)
        least = limits.min
        most = limits.max
    return jnp.full_like(value, least if op is ReduceOp.MAX else most)


def reduce_alone(op: ReduceOp, value: Any) -> Any:
    """Returns the reduction of a single value, in the dtype that several would have."""
    if isinstance(value, bool):
        value = jnp.asarray(value)
    # Python's other numbers, and tangents of integers, stay as they are.
    dtype = getattr(value, "dtype", float0)
    keeps_dtype = dtype == float0 or jnp.issubdtype(dtype, jnp.inexact)
    if keeps_dtype or op in _EXTREMES:
        return value

    if op is ReduceOp.MEAN:
        return value / 1  # a float, as the mean of several integers is
    is_flag = jnp.issubdtype(dtype, jnp.bool_)
    return value.astype(int) if is_flag else value


def reduce_along(op: ReduceOp, value: jax.Array, axis: int | None) -> jax.Array:
    """Returns a value reduced along one of its own axes; `None` for no axis."""
    return value if axis is None else _ALONG_AXIS[op](value, axis)
