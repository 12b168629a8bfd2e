"""Kinds of feature columns: how each turns the features of a batch into numbers.

The interface follows `tf.feature_column`. A *dense* column gives numbers, and a
*categorical* column gives the ids of categories. A linear estimator takes both: it has
one weight for each category. A network takes dense columns, so wrap a categorical
column for it in `indicator_column` or `embedding_column`.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from armillary.errors import EstimatorError

MISSING = -1
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
        is_known = (ids >= MISSING) & (ids < self.size)
        return jnp.where(is_known, ids, self.default_value)


@dataclass(frozen=True)
class VocabularyColumn(CategoricalColumn):
    """See `categorical_column_with_vocabulary_list`."""

    vocabulary: tuple[Any, ...]
    default_value: int = MISSING
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
        ids = {word: i for i, word in enumerate(self.vocabulary)}

        def find(word: str) -> int:
            if word in ids:
                return ids[word]
            if not word:
                return MISSING
            if self.num_oov_buckets:
                return len(ids) + _hash_text(word) % self.num_oov_buckets
            return self.default_value

        return _map_strings(self.key, find, values)

    def read_ids(self, features: Any) -> jax.Array:
        values = _read_integers(features, self.key, self.function)
        if self.has_strings:
            return values
        order = np.argsort(self.vocabulary)
        words = jnp.asarray(np.asarray(self.vocabulary)[order], jnp.int32)
        place = jnp.clip(jnp.searchsorted(words, values), 0, len(order) - 1)
        is_known = words[place] == values
        ids = jnp.asarray(order, jnp.int32)[place]

        others = jnp.full_like(values, self.default_value)
        if self.num_oov_buckets:
            first = len(self.vocabulary)
            others = first + _hash_integers(values, self.num_oov_buckets)
        others = jnp.where(values == MISSING, MISSING, others)
        return jnp.where(is_known, ids, others)


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
            return _hash_text(word) % self.size if word else MISSING

        return _map_strings(self.key, find, values)

    def read_ids(self, features: Any) -> jax.Array:
        values = _read_integers(features, self.key, self.function)
        if self.has_strings:
            return values
        hashed = _hash_integers(values, self.size)
        return jnp.where(values == MISSING, MISSING, hashed)


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

        is_there = ids != MISSING
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
    return (ids < MISSING) | (ids >= num_buckets)


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
    """Returns the ids that a function finds for strings, in the same shape."""
    words = np.asarray(values)
    if words.dtype.kind == "S":
        words = np.char.decode(words, "utf-8")
    may_hold_strings = words.dtype.kind in "UO"
    if not may_hold_strings or not all(isinstance(word, str) for word in words.flat):
        raise TypeError(
            f"`values` for the column {key!r} is an array of dtype {words.dtype}, but "
            'it must hold strings. Write `values.astype("str")`.'
        )
    ids = [find(str(word)) for word in words.flat]
    return np.array(ids, np.int32).reshape(words.shape)
