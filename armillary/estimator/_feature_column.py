"""The functions of `tf.feature_column`, which make columns from checked arguments."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from armillary._checks import (
    check_callable,
    check_instance,
    check_one_of,
    check_positive_int,
    is_positive_int,
)
from armillary.estimator._columns import (
    MISSING,
    BucketizedColumn,
    CategoricalColumn,
    EmbeddingColumn,
    HashedColumn,
    IdentityColumn,
    IndicatorColumn,
    NumericColumn,
    VocabularyColumn,
)


def _check_key(key: Any) -> str:
    if not isinstance(key, str) or not key.strip():
        raise ValueError(
            f"`key` is {key!r}, but it must be the name of a feature: a string that is "
            'not empty. Write `key="x"`.'
        )
    return key


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
        shape: The shape of the feature of one example. A single number may come with or
            without an axis.
        dtype: The type that the numbers are converted to.
        normalizer_fn: Applied to the numbers of a batch, shape `(batch, *shape)`, for
            example to scale them. It must not change the shape.

    Returns:
        The column, for `feature_columns` of an estimator.

    Raises:
        ValueError: If `key` is empty, or `shape` is not made of positive integers.
        TypeError: If `normalizer_fn` cannot be called, or `dtype` is not a type of
            numbers.
    """
    _check_key(key)
    sizes: Any = tuple(shape) if isinstance(shape, list | tuple) else (shape,)
    if not sizes or not all(map(is_positive_int, sizes)):
        raise ValueError(
            f"`shape` is {shape!r}, but it must be positive integers. Write "
            f"`numeric_column({key!r}, shape=(4,))`."
        )
    if normalizer_fn is not None:
        check_callable("normalizer_fn", normalizer_fn)
    try:
        is_number = jnp.issubdtype(jnp.dtype(dtype), jnp.number)
    except TypeError:
        is_number = False
    if dtype is None or not is_number:
        raise TypeError(
            f"`dtype` is {dtype!r}, but it must be a type of numbers. Write "
            "`dtype=jnp.float32`."
        )
    return NumericColumn(key, tuple(map(int, sizes)), dtype, normalizer_fn)


def bucketized_column(
    source_column: NumericColumn, boundaries: Sequence[float]
) -> BucketizedColumn:
    """Returns a column of the intervals that numbers lie in.

    It works like `tf.feature_column.bucketized_column`: with the boundaries `[0., 1.]`
    there are three buckets, below 0, from 0 to below 1, and from 1 on. It is a dense
    column (one number for each bucket, 0 or 1), and can be wrapped as a categorical
    one.

    Args:
        source_column: The column of the numbers.
        boundaries: The limits of the buckets, in increasing order.

    Returns:
        The column, for `feature_columns` of an estimator.

    Raises:
        TypeError: If `source_column` is not a `numeric_column`.
        ValueError: If the boundaries are not numbers in increasing order.
    """
    fix = 'Write `bucketized_column(numeric_column("age"), boundaries=[18, 65])`.'
    check_instance("source_column", source_column, NumericColumn, fix)
    if not _are_increasing(boundaries):
        raise ValueError(
            f"`boundaries` is {boundaries!r:.80}, but it must be a list of numbers in "
            f"increasing order. {fix}"
        )
    limits = tuple(map(float, boundaries))
    return BucketizedColumn(source_column.key, source_column, limits)


def _are_increasing(boundaries: Any) -> bool:
    if not isinstance(boundaries, list | tuple) or not boundaries:
        return False
    for boundary in boundaries:
        if not isinstance(boundary, int | float) or not math.isfinite(boundary):
            return False
    return all(a < b for a, b in itertools.pairwise(boundaries))


def categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> IdentityColumn:
    """Returns a column whose feature holds ids from 0 to `num_buckets - 1`.

    It works like `tf.feature_column.categorical_column_with_identity`. An example has
    one id, or several along a second axis; -1 stands for no category.

    Args:
        key: The name of the feature.
        num_buckets: The number of categories.
        default_value: The id to take for an id out of range. `None` makes the loss NaN,
            which ends training with an error.

    Returns:
        The column, for a linear estimator, or to be wrapped for a network.

    Raises:
        ValueError: If `key` is empty, or a number is out of range.
    """
    _check_key(key)
    num_buckets = check_positive_int("num_buckets", num_buckets)
    if default_value is not None:
        default_value = _check_id("default_value", default_value, num_buckets)
    return IdentityColumn(key, num_buckets, default_value)


def _check_id(name: str, value: Any, num_buckets: int) -> int:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not 0 <= value < num_buckets:
        raise ValueError(
            f"`{name}` is {value!r}, but it must be the id of a category, from 0 to "
            f"{num_buckets - 1}. Use `{name}=0`."
        )
    return int(value)


def categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: Sequence[Any],
    *,
    default_value: int = -1,
    num_oov_buckets: int = 0,
) -> VocabularyColumn:
    """Returns a column of categories that are given as a list.

    It works like `tf.feature_column.categorical_column_with_vocabulary_list`. A feature
    of integers is looked up in the list. Strings cannot be on a device, so `input_fn`
    gives their ids::

        color = categorical_column_with_vocabulary_list("color", ["red", "green"])
        features = {"color": color.to_ids(["green", "red", "green"])}

    Args:
        key: The name of the feature.
        vocabulary_list: The categories: all strings or all integers, each once.
        default_value: The id of any other value; -1 ignores it.
        num_oov_buckets: The number of ids that all other values share, by a hash. These
            ids follow the ids of the list. Leave out `default_value` then.

    Returns:
        The column, for a linear estimator, or to be wrapped for a network.

    Raises:
        ValueError: If `key` is empty, the list is empty, mixed or names a category
            twice, or a number is out of range.
    """
    _check_key(key)
    fix = f'Write `categorical_column_with_vocabulary_list({key!r}, ["a", "b"])`.'
    words = _as_words(vocabulary_list)
    if not words or len(set(words)) < len(words):
        raise ValueError(
            f"`vocabulary_list` is {vocabulary_list!r:.80}, but it must be a list of "
            f"strings or of integers of 32 bits, each once. {fix}"
        )
    is_zero = isinstance(num_oov_buckets, int) and num_oov_buckets == 0
    is_count = is_zero or is_positive_int(num_oov_buckets)
    if not is_count or isinstance(num_oov_buckets, bool):
        raise ValueError(
            f"`num_oov_buckets` is {num_oov_buckets!r}, but it must be a number of "
            "buckets for values outside the vocabulary. Use `num_oov_buckets=1`, or 0."
        )
    is_ignored = isinstance(default_value, int) and default_value == MISSING
    if not is_ignored:
        _check_id("default_value", default_value, len(words))
        if num_oov_buckets:
            raise ValueError(
                f"`default_value` is {default_value} and `num_oov_buckets` is "
                f"{num_oov_buckets}, but only one of the two can be used for a value "
                "outside the vocabulary. Leave out `default_value`."
            )
    return VocabularyColumn(key, tuple(words), int(default_value), int(num_oov_buckets))


def _as_words(vocabulary: Any) -> list[Any]:
    """Returns a vocabulary as a list; an empty list if it is not valid."""
    if isinstance(vocabulary, np.ndarray):
        vocabulary = vocabulary.tolist()
    if not isinstance(vocabulary, list | tuple):
        return []
    words = list(vocabulary)
    if all(map(_is_word, words)) or all(map(_is_short_integer, words)):
        return words
    return []


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_short_integer(value: Any) -> bool:
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return abs(value) < 2**31


def categorical_column_with_hash_bucket(
    key: str, hash_bucket_size: int, dtype: Any = str
) -> HashedColumn:
    """Returns a column of categories that share ids by a hash.

    It works like `tf.feature_column.categorical_column_with_hash_bucket`, with another
    hash. A feature of integers is hashed as it is. Strings cannot be on a device, so
    `input_fn` gives their ids: `{"word": column.to_ids(words)}`.

    Args:
        key: The name of the feature.
        hash_bucket_size: The number of ids.
        dtype: `str`, or `int` for a feature of integers.

    Returns:
        The column, for a linear estimator, or to be wrapped for a network.

    Raises:
        ValueError: If `key` is empty, or `hash_bucket_size` is not positive.
        TypeError: If `dtype` is neither strings nor integers.
    """
    _check_key(key)
    size = check_positive_int("hash_bucket_size", hash_bucket_size, 2**31 - 1)
    try:
        kind = np.dtype(dtype).kind if dtype is not None else ""
    except TypeError:
        kind = ""
    if kind not in "iuUS" or not kind:
        raise TypeError(
            f"`dtype` is {dtype!r}, but categories are strings or integers. Write "
            "`dtype=int`, or leave it out for strings."
        )
    return HashedColumn(key, size, kind in "US")


def indicator_column(
    categorical_column: CategoricalColumn | BucketizedColumn,
) -> IndicatorColumn:
    """Returns a dense column with the count of each category.

    It works like `tf.feature_column.indicator_column`: one-hot, or multi-hot for
    examples with several categories.

    Args:
        categorical_column: The column of the categories.

    Returns:
        The column, for `feature_columns` of an estimator.

    Raises:
        TypeError: If `categorical_column` is not a column of categories.
    """
    _check_categorical(categorical_column, "indicator_column")
    return IndicatorColumn(categorical_column.key, categorical_column)


def embedding_column(
    categorical_column: CategoricalColumn | BucketizedColumn,
    dimension: int,
    combiner: Literal["mean", "sqrtn", "sum"] = "mean",
    initializer: Callable[..., jax.Array] | None = None,
) -> EmbeddingColumn:
    """Returns a dense column with a trained vector for each category.

    It works like `tf.feature_column.embedding_column`.

    Args:
        categorical_column: The column of the categories.
        dimension: The length of a vector.
        combiner: The way to combine the vectors of an example's categories: `"mean"`,
            `"sum"`, or `"sqrtn"`, the sum divided by the square root of their number.
        initializer: Makes the vectors, such as a function of `nnx.initializers`. `None`
            is a truncated normal distribution with the deviation `1 / sqrt(dimension)`.

    Returns:
        The column, for `feature_columns` of an estimator.

    Raises:
        TypeError: If `categorical_column` is not a column of categories, or
            `initializer` cannot be called.
        ValueError: If `dimension` is not positive, or `combiner` is not one of these.
    """
    _check_categorical(categorical_column, "embedding_column")
    dimension = check_positive_int("dimension", dimension)
    check_one_of("combiner", combiner, ("mean", "sqrtn", "sum"))
    if initializer is not None:
        check_callable("initializer", initializer)
    key = categorical_column.key
    return EmbeddingColumn(key, categorical_column, dimension, combiner, initializer)


def _check_categorical(column: Any, function: str) -> None:
    arguments = 'categorical_column_with_identity("x", num_buckets=3)'
    if function == "embedding_column":
        arguments += ", dimension=8"
    kinds = CategoricalColumn | BucketizedColumn
    fix = f"Write `{function}({arguments})`."
    check_instance("categorical_column", column, kinds, fix)
