"""Feature columns, which turn features into numbers for the canned estimators.

The interface follows `tf.feature_column`. A *dense* column gives numbers, and a
*categorical* column gives the ids of categories. A linear estimator takes both: it has
one weight for each category. A network takes dense columns, so wrap a categorical
column for it in `indicator_column` or `embedding_column`.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from armillary._checks import (
    check_callable,
    check_instance,
    check_one_of,
    check_positive_int,
    is_positive_int,
)
from armillary.errors import EstimatorError

_MISSING = -1
"""The id that stands for no category. TensorFlow ignores -1, too."""


def _read_feature(features: Any, key: str, column: str) -> jax.Array:
    """Returns the feature that a column reads, with the examples on its first axis."""
    if not isinstance(features, Mapping):
        raise EstimatorError(
            f"The features are of type {type(features).__name__}, but columns look "
            f"them up by name. Return batches `({{{key!r}: ...}}, labels)` from "
            "`input_fn`."
        )
    if key not in features:
        raise EstimatorError(
            f"The features have no {key!r}, which `{column}({key!r})` reads; they have "
            f"{sorted(map(str, features))}. Return it from `input_fn`, or leave the "
            "column out."
        )
    return jnp.asarray(features[key])


@dataclass(frozen=True)
class DenseColumn:
    """A column of numbers: `num_inputs` for each example."""

    key: str

    @property
    def name(self) -> str:
        """The name by which columns are sorted, also in checkpoints."""
        return self.key

    @property
    def num_inputs(self) -> int:
        """The number of values in each example."""
        raise NotImplementedError

    def read(self, features: Any, table: Any = None) -> jax.Array:
        """Returns the numbers of a batch, shape `(batch, num_inputs)`."""
        raise NotImplementedError

    def make_table(self, rngs: nnx.Rngs) -> nnx.Module | None:
        """Returns the parameters that `read` needs, if any."""
        del rngs
        return None


@dataclass(frozen=True)
class CategoricalColumn:
    """A column of categories; each category has an id from 0 to `num_buckets - 1`."""

    key: str

    @property
    def name(self) -> str:
        """The name by which columns are sorted, also in checkpoints."""
        return self.key

    @property
    def num_buckets(self) -> int:
        """The number of categories."""
        raise NotImplementedError

    def read_ids(self, features: Any) -> jax.Array:
        """Returns ids of shape `(batch, n)`; -1 stands for no category."""
        raise NotImplementedError


@dataclass(frozen=True)
class NumericColumn(DenseColumn):
    """See `numeric_column`."""

    shape: tuple[int, ...] = (1,)
    dtype: Any = jnp.float32
    normalizer_fn: Callable[[jax.Array], jax.Array] | None = None

    @property
    def num_inputs(self) -> int:
        return math.prod(self.shape)

    def read(self, features: Any, table: Any = None) -> jax.Array:
        del table
        values = _read_feature(features, self.key, "numeric_column")
        shape = values.shape[1:]
        has_no_axis = shape == () and self.shape == (1,)
        if shape != self.shape and not has_no_axis:
            raise EstimatorError(
                f"The feature {self.key!r} has the shape {shape} for each example, but "
                f"its column has {self.shape}. Write `numeric_column({self.key!r}, "
                f"shape={shape})`."
            )
        count = values.shape[0]
        values = values.astype(self.dtype).reshape(count, *self.shape)
        if self.normalizer_fn is not None:
            values = self.normalizer_fn(values)
        return values.reshape(count, self.num_inputs).astype(jnp.float32)


@dataclass(frozen=True)
class BucketizedColumn(DenseColumn):
    """See `bucketized_column`; it is dense (one-hot), and also categorical."""

    source: NumericColumn
    boundaries: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"{self.key}_bucketized"

    @property
    def num_buckets(self) -> int:
        """The number of categories, which are the buckets of all values."""
        return self.source.num_inputs * (len(self.boundaries) + 1)

    @property
    def num_inputs(self) -> int:
        return self.num_buckets

    def read_ids(self, features: Any) -> jax.Array:
        """Returns the bucket of every number, shape `(batch, numbers)`."""
        values = self.source.read(features)
        limits = jnp.asarray(self.boundaries, jnp.float32)
        buckets = jnp.searchsorted(limits, values, side="right")
        first = jnp.arange(values.shape[1]) * (len(self.boundaries) + 1)
        return (buckets + first[None]).astype(jnp.int32)

    def read(self, features: Any, table: Any = None) -> jax.Array:
        del table
        return _count_ids(self.read_ids(features), self.num_buckets)


@dataclass(frozen=True)
class IdentityColumn(CategoricalColumn):
    """See `categorical_column_with_identity`."""

    size: int
    default_value: int | None = None

    function: ClassVar[str] = "categorical_column_with_identity"

    @property
    def num_buckets(self) -> int:
        return self.size

    def read_ids(self, features: Any) -> jax.Array:
        ids = _read_integers(features, self.key, self.function)
        if self.default_value is None:
            return ids
        is_known = (ids >= _MISSING) & (ids < self.size)
        return jnp.where(is_known, ids, self.default_value)


@dataclass(frozen=True)
class VocabularyColumn(CategoricalColumn):
    """See `categorical_column_with_vocabulary_list`."""

    vocabulary: tuple[Any, ...]
    default_value: int = _MISSING
    num_oov_buckets: int = 0

    function: ClassVar[str] = "categorical_column_with_vocabulary_list"

    @property
    def num_buckets(self) -> int:
        return len(self.vocabulary) + self.num_oov_buckets

    @property
    def has_strings(self) -> bool:
        """True if the categories are strings."""
        return isinstance(self.vocabulary[0], str)

    def to_ids(self, values: Any) -> np.ndarray:
        """Returns the ids of categories, for a feature of `input_fn`.

        Strings cannot be on a device, so a feature of strings holds their ids.

        Args:
            values: Strings, in an array or nested lists of any shape.

        Returns:
            Integers of 32 bits, of the same shape. A string outside the vocabulary has
            `default_value`, or one of the buckets that `num_oov_buckets` adds.

        Raises:
            TypeError: If `values` are not of the kind of the vocabulary.
        """
        if not self.has_strings:
            raise TypeError(
                f"`to_ids` of the column {self.key!r} was called, but its vocabulary "
                "holds integers, which the column looks up itself. Give the feature "
                "its integers as they are."
            )
        places = {word: i for i, word in enumerate(self.vocabulary)}

        def find(word: str) -> int:
            found = places.get(word)
            if found is not None:
                return found
            if not word:
                return _MISSING
            if self.num_oov_buckets:
                return len(places) + _hash_text(word) % self.num_oov_buckets
            return self.default_value

        return _map_strings(self.key, find, values)

    def read_ids(self, features: Any) -> jax.Array:
        values = _read_integers(features, self.key, self.function)
        if self.has_strings:
            return values
        order = np.argsort(self.vocabulary)
        words = jnp.asarray(np.asarray(self.vocabulary)[order], jnp.int32)
        place = jnp.clip(jnp.searchsorted(words, values), 0, len(order) - 1)
        ids = jnp.asarray(order, jnp.int32)[place]
        other = jnp.full_like(values, self.default_value)
        if self.num_oov_buckets:
            count = len(self.vocabulary)
            other = count + _hash_integers(values, self.num_oov_buckets)
        other = jnp.where(values == _MISSING, _MISSING, other)
        return jnp.where(words[place] == values, ids, other)


@dataclass(frozen=True)
class HashedColumn(CategoricalColumn):
    """See `categorical_column_with_hash_bucket`."""

    size: int
    has_strings: bool

    function: ClassVar[str] = "categorical_column_with_hash_bucket"

    @property
    def num_buckets(self) -> int:
        return self.size

    def to_ids(self, values: Any) -> np.ndarray:
        """Returns the ids of categories, for a feature of `input_fn`.

        Strings cannot be on a device, so a feature of strings holds their ids.

        Args:
            values: Strings, in an array or nested lists of any shape.

        Returns:
            Integers of 32 bits, of the same shape; -1 for an empty string.

        Raises:
            TypeError: If `values` are not of the `dtype` of the column.
        """
        if not self.has_strings:
            raise TypeError(
                f"`to_ids` of the column {self.key!r} was called, but its `dtype` is "
                "an integer, which the column hashes itself. Give the feature its "
                "integers as they are."
            )

        def find(word: str) -> int:
            return _hash_text(word) % self.size if word else _MISSING

        return _map_strings(self.key, find, values)

    def read_ids(self, features: Any) -> jax.Array:
        values = _read_integers(features, self.key, self.function)
        if self.has_strings:
            return values
        hashed = _hash_integers(values, self.size)
        return jnp.where(values == _MISSING, _MISSING, hashed)


@dataclass(frozen=True)
class IndicatorColumn(DenseColumn):
    """See `indicator_column`."""

    source: CategoricalColumn | BucketizedColumn

    @property
    def name(self) -> str:
        return f"{self.source.name}_indicator"

    @property
    def num_inputs(self) -> int:
        return self.source.num_buckets

    def read(self, features: Any, table: Any = None) -> jax.Array:
        del table
        return _count_ids(self.source.read_ids(features), self.source.num_buckets)


@dataclass(frozen=True)
class EmbeddingColumn(DenseColumn):
    """See `embedding_column`."""

    source: CategoricalColumn | BucketizedColumn
    dimension: int
    combiner: str = "mean"
    initializer: Callable[..., jax.Array] | None = None

    @property
    def name(self) -> str:
        return f"{self.source.name}_embedding"

    @property
    def num_inputs(self) -> int:
        return self.dimension

    def make_table(self, rngs: nnx.Rngs) -> nnx.Module | None:
        stddev = 1 / math.sqrt(self.dimension)
        initializer = self.initializer or nnx.initializers.truncated_normal(stddev)
        return nnx.Embed(
            self.source.num_buckets,
            self.dimension,
            embedding_init=initializer,
            rngs=rngs,
        )

    def read(self, features: Any, table: Any = None) -> jax.Array:
        ids = self.source.read_ids(features)
        num_rows = self.source.num_buckets
        rows = table(jnp.clip(ids, 0, num_rows - 1))

        is_there = ids != _MISSING
        is_wrong = _is_out_of_range(ids, num_rows)
        rows = jnp.where(is_there[..., None], rows, 0)
        rows = jnp.where(is_wrong[..., None], jnp.nan, rows)

        total = rows.sum(axis=1)
        count = jnp.maximum(is_there.sum(axis=1, keepdims=True), 1)
        if self.combiner == "mean":
            return total / count
        if self.combiner == "sqrtn":
            return total / jnp.sqrt(count)
        return total


def _read_integers(features: Any, key: str, function: str) -> jax.Array:
    """Returns a feature of integers, shape `(batch, n)`."""
    values = _read_feature(features, key, function)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise EstimatorError(
            f"The feature {key!r} has the dtype {values.dtype}, but `{function}` reads "
            'integers. Write `.astype("int32")` in `input_fn`; ids of strings come '
            "from `to_ids` of the column."
        )
    if values.ndim == 1:
        values = values[:, None]
    return values.reshape(values.shape[0], -1).astype(jnp.int32)


def _is_out_of_range(ids: jax.Array, num_buckets: int) -> jax.Array:
    return (ids < _MISSING) | (ids >= num_buckets)


def _count_ids(ids: jax.Array, num_buckets: int) -> jax.Array:
    """Returns how often each id occurs, shape `(batch, num_buckets)`.

    An id out of range makes the row NaN, which ends training with an error. A device
    cannot raise the error itself.
    """
    counts = jax.nn.one_hot(ids, num_buckets).sum(axis=1)
    is_wrong = _is_out_of_range(ids, num_buckets).any(axis=1, keepdims=True)
    return jnp.where(is_wrong, jnp.nan, counts)


def _hash_text(word: str) -> int:
    return zlib.crc32(word.encode())


def _hash_integers(values: jax.Array, num_buckets: int) -> jax.Array:
    """Returns a bucket for each integer; neighbors get unrelated buckets."""
    mixed = values.astype(jnp.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    mixed = mixed ^ (mixed >> 16)
    return (mixed % jnp.uint32(num_buckets)).astype(jnp.int32)


def _map_strings(key: str, find: Callable[[str], int], values: Any) -> np.ndarray:
    words = np.asarray(values)
    if words.dtype.kind == "S":
        words = np.char.decode(words, "utf-8")
    if words.dtype.kind not in "UO" or not all(isinstance(w, str) for w in words.flat):
        raise TypeError(
            f"`values` for the column {key!r} is an array of dtype {words.dtype}, but "
            'it must hold strings. Write `values.astype("str")`.'
        )
    ids = [find(str(word)) for word in words.flat]
    return np.array(ids, np.int32).reshape(words.shape)


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
    is_list = isinstance(boundaries, list | tuple) and len(boundaries) > 0
    are_numbers = is_list and all(
        isinstance(each, int | float) and math.isfinite(each) for each in boundaries
    )
    if not are_numbers or any(a >= b for a, b in itertools.pairwise(boundaries)):
        raise ValueError(
            f"`boundaries` is {boundaries!r:.80}, but it must be a list of numbers in "
            f"increasing order. {fix}"
        )
    limits = tuple(map(float, boundaries))
    return BucketizedColumn(source_column.key, source_column, limits)


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
    is_array = isinstance(vocabulary_list, np.ndarray)
    given = vocabulary_list.tolist() if is_array else vocabulary_list
    words: list[Any] = list(given) if isinstance(given, list | tuple) else []
    are_strings = bool(words) and all(isinstance(word, str) and word for word in words)
    are_integers = bool(words) and all(
        isinstance(word, int) and not isinstance(word, bool) and abs(word) < 2**31
        for word in words
    )
    if not (are_strings or are_integers) or len(set(words)) < len(words):
        raise ValueError(
            f"`vocabulary_list` is {vocabulary_list!r:.80}, but it must be a list of "
            f"strings or of integers of 32 bits, each once. {fix}"
        )
    is_count = is_positive_int(num_oov_buckets) or (
        isinstance(num_oov_buckets, int) and num_oov_buckets == 0
    )
    if not is_count or isinstance(num_oov_buckets, bool):
        raise ValueError(
            f"`num_oov_buckets` is {num_oov_buckets!r}, but it must be a number of "
            "buckets for values outside the vocabulary. Use `num_oov_buckets=1`, or 0."
        )
    is_ignored = isinstance(default_value, int) and default_value == _MISSING
    if not is_ignored:
        _check_id("default_value", default_value, len(words))
        if num_oov_buckets:
            raise ValueError(
                f"`default_value` is {default_value} and `num_oov_buckets` is "
                f"{num_oov_buckets}, but only one of the two can be used for a value "
                "outside the vocabulary. Leave out `default_value`."
            )
    return VocabularyColumn(key, tuple(words), int(default_value), int(num_oov_buckets))


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
    fix = f'Write `{function}(categorical_column_with_identity("x", num_buckets=3)'
    fix += ", dimension=8)`." if function == "embedding_column" else ")`."
    kinds = CategoricalColumn | BucketizedColumn
    check_instance("categorical_column", column, kinds, fix)


class InputLayer(nnx.Module):
    """Reads the columns of a batch, and puts them side by side in one array.

    Args:
        columns: Dense columns, sorted by name.
        rngs: Makes the first values of embeddings.
    """

    def __init__(self, columns: tuple[DenseColumn, ...], rngs: nnx.Rngs) -> None:
        self.columns = columns
        made = {column.name: column.make_table(rngs) for column in columns}
        tables = {name: table for name, table in made.items() if table is not None}
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
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not found:
        raise EstimatorError(
            f"`feature_columns` has {twice or 'no column'}"
            f"{' more than once' if twice else ''}, but it must name each feature "
            'that is read, once. Write `feature_columns=[numeric_column("x")]`.'
        )
    return tuple(sorted(found, key=lambda column: column.name))
