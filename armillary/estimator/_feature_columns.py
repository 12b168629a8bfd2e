"""Columns: which features the estimators of the package read, and how."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from armillary._checks import check_callable, is_positive_int
from armillary.errors import EstimatorError


@dataclass(frozen=True)
class NumericColumn:
    """A feature made of numbers; `numeric_column` makes it and documents it."""

    key: str
    shape: tuple[int, ...] = (1,)
    dtype: Any = jnp.float32
    normalizer_fn: Callable[[jax.Array], jax.Array] | None = None

    @property
    def num_inputs(self) -> int:
        """How many numbers an example has."""
        return math.prod(self.shape)

    def read(self, features: Any) -> jax.Array:
        """Returns the numbers of a batch, of shape `(batch, num_inputs)`.

        Raises:
            EstimatorError: If the feature is missing, or of another shape.
        """
        if not isinstance(features, Mapping):
            raise EstimatorError(
                f"The features are of type {type(features).__name__}, but columns "
                "find theirs in a dictionary. Return batches "
                f"`({{{self.key!r}: ...}}, labels)` from `input_fn`."
            )
        if self.key not in features:
            raise EstimatorError(
                f"The features have no {self.key!r}, which `numeric_column"
                f"({self.key!r})` reads; they have {sorted(map(str, features))}. "
                "Return it from `input_fn`, or leave the column out."
            )
        values = jnp.asarray(features[self.key])
        shape = values.shape[1:]
        if shape != self.shape and not (self.shape == (1,) and shape == ()):
            raise EstimatorError(
                f"The feature {self.key!r} has the shape {shape} for each example, "
                f"but its column has {self.shape}. Write `numeric_column({self.key!r}, "
                f"shape={shape})`."
            )
        values = values.astype(self.dtype).reshape(values.shape[0], *self.shape)
        if self.normalizer_fn is not None:
            values = self.normalizer_fn(values)
        return values.reshape(values.shape[0], self.num_inputs)


def numeric_column(
    key: str,
    shape: int | Iterable[int] = (1,),
    *,
    dtype: Any = jnp.float32,
    normalizer_fn: Callable[[jax.Array], jax.Array] | None = None,
) -> NumericColumn:
    """Returns a column of numbers (`tf.feature_column.numeric_column`).

    Args:
        key: The name of the feature.
        shape: The shape that an example has of it. A single number per example may
            come with or without an axis.
        dtype: What the numbers are converted to.
        normalizer_fn: Applied to the numbers of a batch, shape `(batch, *shape)`, such
            as to scale them. It must not change the shape.

    Raises:
        ValueError: If `key` is no string, or `shape` is not made of positive integers.
        TypeError: If `normalizer_fn` cannot be called.
    """
    sizes: Any = tuple(shape) if isinstance(shape, list | tuple) else (shape,)
    is_name = isinstance(key, str) and key.strip()
    if not is_name or not all(map(is_positive_int, sizes)) or not sizes:
        raise ValueError(
            f"`key` is {key!r} and `shape` is {shape!r}, but the key must be a string "
            "that is not empty, and the shape positive integers. Write "
            '`numeric_column("x", shape=(4,))`.'
        )
    if normalizer_fn is not None:
        check_callable("normalizer_fn", normalizer_fn)
    return NumericColumn(key, sizes, dtype, normalizer_fn)


def check_columns(columns: Any) -> tuple[NumericColumn, ...]:
    """Returns columns in the order of their names, as TensorFlow sorts them.

    Raises:
        EstimatorError: If there is none, or one is of another kind.
    """
    found = columns if isinstance(columns, list | tuple) else (columns,)
    wrong = [column for column in found if not isinstance(column, NumericColumn)]
    if wrong or not found:
        raise EstimatorError(
            f"`feature_columns` is {columns!r:.80}, but it must "
            'be a list of numeric columns. Write `[numeric_column("x")]`; turn other '
            "features into numbers in `input_fn`."
        )
    return tuple(sorted(found, key=lambda column: column.key))


def read_columns(columns: tuple[NumericColumn, ...], features: Any) -> jax.Array:
    """Returns the numbers of all columns, of shape `(batch, numbers)`."""
    return jnp.concatenate([column.read(features) for column in columns], axis=1)
