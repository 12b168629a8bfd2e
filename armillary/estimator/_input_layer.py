"""The input layer of the canned estimators: their columns, side by side."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from armillary.errors import EstimatorError
from armillary.estimator._columns import (
    CategoricalColumn,
    DenseColumn,
    IndicatorColumn,
)


class InputLayer(nnx.Module):
    """Reads the columns of a batch, and puts them side by side in one array.

    Args:
        columns: Dense columns, sorted by name.
        rngs: Makes the first values of embeddings.
    """

    def __init__(self, columns: tuple[DenseColumn, ...], rngs: nnx.Rngs) -> None:
        self.columns = columns
        tables: dict[str, nnx.Module] = {}
        for column in columns:
            table = column.make_table(rngs)
            if table is not None:
                tables[column.name] = table
        # In Flax 0.12.4, `get` raises an error for a key that is missing.
        self.names_of_tables = tuple(tables)
        self.tables = nnx.Dict(tables)

    def __call__(self, features: Any) -> jax.Array:
        inputs = []
        for column in self.columns:
            has_table = column.name in self.names_of_tables
            table = self.tables[column.name] if has_table else None
            inputs.append(column.read(features, table))
        return jnp.concatenate(inputs, axis=1)


def as_dense(columns: Any, *, is_linear: bool) -> tuple[DenseColumn, ...]:
    """Returns dense columns in the order of their names, as TensorFlow sorts them.

    Args:
        columns: The argument `feature_columns` of the user.
        is_linear: True if a categorical column has weights of its own.
    """
    given = columns if isinstance(columns, list | tuple | set) else [columns]
    found: list[DenseColumn] = []
    for column in given:
        if isinstance(column, CategoricalColumn) and is_linear:
            column = IndicatorColumn(column.key, column)
        if isinstance(column, CategoricalColumn):
            raise EstimatorError(
                f"`feature_columns` has the categorical column {column.name!r}, but a "
                "network takes numbers. Write `indicator_column(column)`, or "
                "`embedding_column(column, dimension=8)`."
            )
        if not isinstance(column, DenseColumn):
            raise EstimatorError(
                f"`feature_columns` has {column!r:.80} of type "
                f"{type(column).__name__}, but it must be a list of columns. Write "
                '`feature_columns=[armillary.estimator.numeric_column("x")]`.'
            )
        found.append(column)

    names = [column.name for column in found]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated or not found:
        problem = f"{repeated} more than once" if repeated else "no column"
        raise EstimatorError(
            f"`feature_columns` has {problem}, but it must name each feature "
            'that is read, once. Write `feature_columns=[numeric_column("x")]`.'
        )
    return tuple(sorted(found, key=lambda column: column.name))
