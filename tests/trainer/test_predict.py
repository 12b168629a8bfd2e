"""Tests of `predict`: every example once, in order, on any number of replicas."""

import functools
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.data import InputOptions, from_arrays
from armillary.errors import StateStructureError
from tests.data.test_source import Positioned, Stateful
from tests.mistakes import mistakes
from tests.problems import make_strategy

ROWS = {
    "x": np.random.default_rng(0).normal(size=(29, 3)).astype(np.float32),
    "id": np.arange(29),
}
linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))


def predict_fn(batch):
    return {"y": linear(batch["x"]), "id": batch["id"]}


def read(outputs, batch_size):
    """Returns outputs joined, after a check that they have the batches of the data."""
    outputs = list(outputs)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(outputs))
    sizes = [len(output["id"]) for output in outputs]
    assert sizes == [
        len(ROWS["id"][i : i + batch_size]) for i in range(0, 29, batch_size)
    ]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *outputs)


@pytest.mark.parametrize("remainder", [None, "exact", "drop", "pad"])
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_every_example_counts_once_and_in_order(num_replicas, remainder):
    strategy = make_strategy(num_replicas)
    # On 4 replicas: 8 and 2 rows, three times; then 9 are left, 8 and 1.
    data = from_arrays(ROWS, batch_size=10)
    dataset = strategy.distribute_dataset(data, InputOptions(remainder=remainder))

    outputs = read(armillary.predict(predict_fn, dataset, strategy=strategy), 10)

    np.testing.assert_array_equal(outputs["id"], ROWS["id"])
    np.testing.assert_allclose(outputs["y"], linear(ROWS["x"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [
        None,
        armillary.OneDeviceStrategy("cpu:1"),
        armillary.ShardedStrategy({"fsdp": 2}, devices=jax.devices()[:2]),
    ],
    ids=["none", "one", "sharded"],
)
def test_a_strategy_is_given_or_in_effect(strategy):
    data = from_arrays(ROWS, batch_size=8)

    outputs = read(armillary.predict(predict_fn, data, strategy=strategy), 8)
    with (strategy or armillary.get_strategy()).scope():
        begun = armillary.predict(predict_fn, data)
    again = read(begun, 8)

    np.testing.assert_array_equal(outputs["id"], ROWS["id"])
    np.testing.assert_array_equal(again["y"], outputs["y"])
    np.testing.assert_allclose(outputs["y"], linear(ROWS["x"]), rtol=1e-5, atol=1e-6)


def test_a_model_and_a_method_will_do():
    expected = linear(ROWS["x"])
    for fn in (linear, linear.__call__, lambda batch: linear(batch)):
        (output,) = armillary.predict(fn, [ROWS["x"]])
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


def test_the_latest_values_are_used_and_nothing_is_compiled_again(no_retrace):
    weight = nnx.Param(jnp.ones(()))

    def fn(batch):
        return batch * weight[...]

    def run():
        return [int(output[0]) for output in armillary.predict(fn, [np.ones(4)] * 3)]

    assert run() == [1, 1, 1]
    weight[...] = jnp.full((), 2, jnp.float32)
    with no_retrace():
        assert run() == [2, 2, 2]


def test_only_the_batches_under_way_are_held():
    num_read, alive = 0, []

    class Row(np.ndarray):
        """An array that tells when it is gone."""

    def make_batches():
        nonlocal num_read
        for number in itertools.count():
            num_read += 1
            batch = np.full(4, number, np.float32).view(Row)
            alive.append(weakref.ref(batch))
            yield batch
            del batch

    outputs = armillary.predict(lambda batch: 2 * batch, make_batches)
    assert num_read == 0
    for number in range(50):
        np.testing.assert_array_equal(next(outputs), np.full(4, 2.0 * number))
        # One is computed ahead, one is taken, two are placed ahead, one is read.
        assert num_read <= number + 6
        assert sum(ref() is not None for ref in alive) <= 6
    outputs.close()
    end = num_read
    assert next(outputs, None) is None
    assert num_read == end


def test_the_position_of_the_dataset_and_the_scope_are_left_alone():
    strategy = make_strategy(2)
    dataset = strategy.distribute_dataset(from_arrays(ROWS, batch_size=4))
    iterator = iter(dataset)
    next(iterator)
    before = dataset.get_state()

    outputs = armillary.predict(predict_fn, dataset, strategy=strategy)
    assert list(next(outputs)["id"]) == [0, 1, 2, 3]
    assert not armillary.distribute.has_strategy()
    assert dataset.get_state() == before
    np.testing.assert_array_equal(
        strategy.gather(next(iterator)["id"], 0), [4, 5, 6, 7]
    )


def run(fn=predict_fn, data=None):
    next(
        armillary.predict(fn, from_arrays(ROWS, batch_size=8) if data is None else data)
    )


def add(batch):
    return batch["x"].sum()


def without_return(batch):
    add(batch)


def own_batches(input_context):
    return [np.zeros(input_context.get_per_replica_batch_size(4))]


@mistakes(
    {
        ValueError: {
            "output of `without_return` is None": lambda: run(without_return),
            r"The output of `add` has shape \(\), but it must be an array whose": (
                lambda: run(add)
            ),
            "repeats its data forever, but `predict` uses each example": lambda: run(
                data=from_arrays(ROWS, batch_size=8, repeat=True)
            ),
            "so there is no one order of its examples": lambda: armillary.predict(
                predict_fn,
                make_strategy(2).distribute_datasets_from_function(own_batches),
                strategy=make_strategy(2),
            ),
        },
    }
)
def test_mistakes_are_errors_at_the_call_or_while_tracing(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_model_in_training_mode_is_refused_and_stays_as_it_is():
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    with pytest.raises(StateStructureError, match=r"`<lambda>` changes 2 arrays of a"):
        next(armillary.predict(lambda batch: norm(batch["x"]), from_rows()))
    np.testing.assert_array_equal(norm.mean[...], 0)


def test_a_function_that_wraps_another_has_programs_of_its_own():
    def inner(batch):
        return batch["x"]

    @functools.wraps(inner)
    def outer(batch):
        return 2 * inner(batch)

    first = next(armillary.predict(inner, from_rows()))
    np.testing.assert_array_equal(
        next(armillary.predict(outer, from_rows())), 2 * first
    )


def from_rows():
    return from_arrays(ROWS, batch_size=10)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("make", [Positioned, Stateful])
def test_a_pass_in_progress_continues_after_a_prediction(make, prefetch):
    strategy = armillary.distribute.DefaultStrategy()
    options = InputOptions(prefetch=prefetch)

    def values(batches):
        return [np.ravel(jax.tree.leaves(batch)[0]).tolist() for batch in batches]

    expected = values(strategy.distribute_dataset(make()))
    assert len(expected) > 2
    dataset = strategy.distribute_dataset(make(), options)
    iterator = iter(dataset)
    first = next(iterator)
    position = dataset.get_state()

    outputs = armillary.predict(lambda batch: batch, dataset, strategy=strategy)
    begun = next(outputs)
    second = next(iterator)  # While the prediction is in progress, too.
    assert values([begun, *outputs]) == expected
    again = armillary.predict(lambda batch: batch, dataset, strategy=strategy)
    assert values(again) == expected

    assert position != dataset.get_state()
    assert values([first, second, *iterator]) == expected
    assert values(dataset) == expected
