"""Tests of feature columns: their numbers and their errors."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary import estimator
from armillary.errors import EstimatorError, NonFiniteError
from armillary.estimator._input_layer import InputLayer, as_dense
from tests.estimator.problems import make_config
from tests.tiers import slow_after_first


def read(column, features):
    """Returns the numbers that a column gives for a batch."""
    layer = InputLayer(as_dense([column], is_linear=True), nnx.Rngs(0))
    return np.asarray(layer(features))


def test_numbers_are_scaled_and_flattened():
    column = estimator.numeric_column(
        "x", shape=(2, 2), normalizer_fn=lambda x: (x - 1) / 2
    )
    x = np.arange(12, dtype="int32").reshape(3, 2, 2)
    np.testing.assert_allclose(read(column, {"x": x}), (x.reshape(3, 4) - 1) / 2)
    column = estimator.numeric_column("x")
    for shape in ((3,), (3, 1)):
        found = read(column, {"x": np.ones(shape)})
        np.testing.assert_array_equal(found, np.ones((3, 1)))


def test_buckets_hold_their_lower_limit():
    column = estimator.bucketized_column(
        estimator.numeric_column("x"), boundaries=[0.0, 1.0]
    )
    x = np.array([-5.0, 0.0, 0.5, 1.0, 7.0])
    np.testing.assert_array_equal(read(column, {"x": x}), np.eye(3)[[0, 1, 1, 2, 2]])


def test_buckets_of_several_numbers_are_side_by_side():
    source = estimator.numeric_column("x", shape=2)
    column = estimator.bucketized_column(source, boundaries=[0])
    found = read(column, {"x": np.array([[-1.0, 1.0], [1.0, -1.0]])})
    np.testing.assert_array_equal(found, [[1, 0, 0, 1], [0, 1, 1, 0]])
    # As a categorical column, each number has its own ids.
    found = read(
        estimator.indicator_column(column), {"x": np.array([[-1.0, 1.0], [1.0, 1.0]])}
    )
    np.testing.assert_array_equal(found, [[1, 0, 0, 1], [0, 1, 0, 1]])


def test_an_indicator_counts_ids_and_ignores_missing_ones():
    column = estimator.indicator_column(
        estimator.categorical_column_with_identity("c", 3)
    )
    found = read(column, {"c": np.array([[0, 2], [1, 1], [-1, 2]])})
    np.testing.assert_array_equal(found, [[1, 0, 1], [0, 2, 0], [0, 0, 1]])


def test_an_id_out_of_range_is_the_default_or_no_number():
    make = estimator.categorical_column_with_identity
    found = read(make("c", 3), {"c": np.array([1, 3, -2])})
    np.testing.assert_array_equal(np.isnan(found).all(axis=1), [False, True, True])
    found = read(make("c", 3, default_value=2), {"c": np.array([1, 3, -2, -1])})
    np.testing.assert_array_equal(found, [[0, 1, 0], [0, 0, 1], [0, 0, 1], [0, 0, 0]])


@pytest.mark.slow
def test_an_id_out_of_range_ends_training(tmp_path):
    column = estimator.categorical_column_with_identity("c", 3)
    made = estimator.LinearRegressor([column], tmp_path, config=make_config())
    with pytest.raises(NonFiniteError):
        made.train(lambda: [({"c": [0, 3]}, [1.0, 1.0])])


def test_integers_are_looked_up_in_a_vocabulary():
    make = estimator.categorical_column_with_vocabulary_list
    features = {"c": np.array([30, 10, 20, 99, -1])}
    found = read(make("c", [30, 10, 20]), features)
    np.testing.assert_array_equal(found, [*np.eye(3), [0, 0, 0], [0, 0, 0]])
    found = read(make("c", [30, 10, 20], default_value=1), features)
    np.testing.assert_array_equal(found, [*np.eye(3), [0, 1, 0], [0, 0, 0]])
    found = read(make("c", [30, 10, 20], num_oov_buckets=2), features)
    assert found[3, :3].sum() == 0
    assert found[3, 3:].sum() == 1


def test_strings_become_ids_on_the_host():
    make = estimator.categorical_column_with_vocabulary_list
    column = make("c", ["red", "green", "blue"])
    ids = column.to_ids([["blue", "red"], ["", "pink"]])
    np.testing.assert_array_equal(ids, [[2, 0], [-1, -1]])
    np.testing.assert_array_equal(read(column, {"c": ids}), [[1, 0, 1], [0, 0, 0]])
    assert make("c", ["a", "b"], default_value=1).to_ids(["x"])[0] == 1
    ids = make("c", ["a", "b"], num_oov_buckets=3).to_ids(np.array([b"x", b"b"]))
    assert ids[0] in (2, 3, 4)
    assert ids[1] == 1


def test_hashed_categories_share_buckets():
    strings = estimator.categorical_column_with_hash_bucket("c", 5)
    ids = strings.to_ids(["a", "b", "a", ""])
    assert ids[0] == ids[2]
    assert ids[3] == -1
    assert set(ids[:3]) <= set(range(5))
    np.testing.assert_array_equal(read(strings, {"c": ids[:3]}), np.eye(5)[ids[:3]])

    integers = estimator.categorical_column_with_hash_bucket("c", 5, dtype=int)
    found = read(integers, {"c": np.array([*range(1000), -1])})
    np.testing.assert_array_equal(found.sum(axis=1), [1] * 1000 + [0])
    # Neighbors are spread over all buckets, about 200 in each.
    assert found.sum(axis=0).min() > 150


@slow_after_first("combiner", ["mean", "sum", "sqrtn"])
def test_an_embedding_combines_the_vectors_of_an_example(combiner):
    column = estimator.embedding_column(
        estimator.categorical_column_with_identity("c", 4), 2, combiner
    )
    layer = InputLayer(as_dense([column], is_linear=False), nnx.Rngs(0))
    table = np.asarray(layer.tables["c_embedding"].embedding[...])
    assert table.shape == (4, 2)
    found = layer({"c": jnp.array([[0, 3], [2, -1], [-1, -1]])})
    divisor = {"mean": 2, "sum": 1, "sqrtn": np.sqrt(2)}[combiner]
    expected = [(table[0] + table[3]) / divisor, table[2], [0, 0]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.isnan(layer({"c": jnp.array([4])})).all()


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_estimators_learn_from_categories(tmp_path, replicas):
    ids = np.arange(64) % 4
    targets = np.array([1.0, -2.0, 3.0, 0.5], "float32")
    words = np.array(["a", "b", "c", "d"])[ids]
    vocabulary = make_vocabulary("word", ["a", "b", "c", "d"])
    features = {"word": vocabulary.to_ids(words)}

    def input_fn():
        arrays = (features, targets[ids])
        return armillary.data.from_arrays(arrays, batch_size=16, repeat=True)

    linear = estimator.LinearRegressor(
        [vocabulary],
        tmp_path / "linear",
        optimizer="Adam",
        config=make_config(replicas),
    ).train(input_fn, steps=200)
    assert linear.evaluate(input_fn, steps=4)["average_loss"] < 0.01

    embedded = estimator.DNNRegressor(
        [16],
        [estimator.embedding_column(vocabulary, 4)],
        tmp_path / "dnn",
        optimizer="Adam",
        config=make_config(replicas),
    )
    before = embedded.evaluate(input_fn, steps=4)["average_loss"]
    embedded.train(input_fn, steps=200)
    assert embedded.evaluate(input_fn, steps=4)["average_loss"] < before


make_vocabulary = estimator.categorical_column_with_vocabulary_list
IDENTITY = estimator.categorical_column_with_identity("c", 3)
NUMBER = estimator.numeric_column("x")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: estimator.numeric_column(""), ValueError, "`key` is ''"),
        (lambda: estimator.numeric_column("x", shape=0), ValueError, "`shape` is 0"),
        (
            lambda: estimator.numeric_column("x", dtype=str),
            TypeError,
            "`dtype` is <class 'str'>",
        ),
        (
            lambda: estimator.bucketized_column(IDENTITY, [1]),
            TypeError,
            "`source_column`",
        ),
        (
            lambda: estimator.bucketized_column(NUMBER, [1, 1]),
            ValueError,
            r"`boundaries` is \[1, 1\]",
        ),
        (
            lambda: estimator.categorical_column_with_identity("c", 3, 3),
            ValueError,
            "`default_value` is 3",
        ),
        (
            lambda: make_vocabulary("c", ["a", 1]),
            ValueError,
            r"`vocabulary_list` is \['a', 1\]",
        ),
        (
            lambda: make_vocabulary("c", ["a"], default_value=0, num_oov_buckets=1),
            ValueError,
            "`default_value` is 0 and `num_oov_buckets` is 1",
        ),
        (lambda: make_vocabulary("c", [1]).to_ids(["1"]), TypeError, "holds integers"),
        (lambda: make_vocabulary("c", ["a"]).to_ids([1]), TypeError, "strings"),
        (
            lambda: estimator.categorical_column_with_hash_bucket("c", 5, float),
            TypeError,
            "`dtype` is <class 'float'>",
        ),
        (
            lambda: estimator.categorical_column_with_hash_bucket("c", 5, int).to_ids(
                ["a"]
            ),
            TypeError,
            "`dtype` is an integer",
        ),
        (
            lambda: estimator.indicator_column(NUMBER),
            TypeError,
            "`categorical_column`",
        ),
        (
            lambda: estimator.embedding_column(IDENTITY, 2, "max"),
            ValueError,
            "`combiner` is 'max'",
        ),
        (
            lambda: read(IDENTITY, {"c": np.ones(2)}),
            EstimatorError,
            "The feature 'c' has the dtype float32",
        ),
    ],
)
def test_wrong_columns_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
