"""Proof: a complete evaluation counts every example once, whatever the sizes."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.problems import Metrics, make_strategy

BOUNDED = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


class Evaluation(Metrics):
    """Metrics, and a state to which every step's outputs are appended."""

    def __init__(self, strategy, read, *, per_replica=False, **options):
        if per_replica:
            dataset = strategy.distribute_datasets_from_function(lambda _: read)
        else:
            dataset = strategy.distribute_dataset(read)
        super().__init__(strategy, dataset, **options)

    def eval_begin(self):
        super().eval_begin()
        return []

    def add(self, batch):
        value, label = batch["value"], batch["label"]
        logits = jax.nn.one_hot(label % 3, 4)
        super().add({"value": value, "logits": logits, "label": label})
        return {"id": batch["id"], "twice": 2 * value}

    def eval_reduce(self, state, step_outputs):
        return [*state, *self.strategy.local_results(step_outputs)]

    def eval_end(self, *state):
        (shares,) = state
        return {
            **super().eval_end(),
            "id": np.concatenate([share["id"] for share in shares]),
            "twice": np.concatenate([share["twice"] for share in shares]),
        }


@functools.cache
def make_evaluation(num_replicas, **options):
    """Returns an evaluator that many examples share, and the list of its batches."""
    batches = []
    evaluation = Evaluation(
        make_strategy(num_replicas), lambda: iter(batches), **options
    )
    return evaluation, batches


def make_arrays(num_examples):
    rng = np.random.default_rng(num_examples)
    return {
        "id": np.arange(num_examples, dtype=np.int32),
        "value": rng.normal(size=num_examples).astype(np.float32),
        "label": rng.integers(0, 4, num_examples).astype(np.int32),
    }


def cut(arrays, batch_size):
    starts = range(0, len(arrays["id"]), batch_size)
    return [
        {name: array[start : start + batch_size] for name, array in arrays.items()}
        for start in starts
    ]


def assert_exact(evaluation, arrays):
    output = evaluation.evaluate(-1)

    value, label = arrays["value"], arrays["label"]
    np.testing.assert_array_equal(output["id"], arrays["id"])
    np.testing.assert_array_equal(output["twice"], 2 * value)
    assert evaluation.counts == (len(value), len(value))
    np.testing.assert_allclose(
        output["average"], value.mean(), rtol=1e-5, atol=1e-6 * np.abs(value).mean()
    )
    np.testing.assert_allclose(output["accuracy"], np.mean(label < 3), rtol=1e-6)


@pytest.mark.slow
@settings(BOUNDED, max_examples=50)
@given(
    num_examples=st.integers(1, 50),
    batch_size=st.integers(1, 16),
    num_replicas=st.integers(1, 4),
    # With one step in a chunk, there are as many programs as shapes.
    options=st.sampled_from([{"steps_per_chunk": 1}, {"compile_loop": False}]),
)
def test_a_complete_evaluation_equals_numpy(
    num_examples, batch_size, num_replicas, options
):
    evaluation, batches = make_evaluation(num_replicas, **options)
    arrays = make_arrays(num_examples)
    batches[:] = cut(arrays, batch_size)

    assert_exact(evaluation, arrays)


@pytest.mark.slow
@settings(BOUNDED, max_examples=25)
@given(num_examples=st.integers(1, 50), per_replica=st.booleans())
def test_a_complete_evaluation_in_chunks_equals_numpy(num_examples, per_replica):
    evaluation, batches = make_evaluation(4, per_replica=per_replica, steps_per_chunk=3)
    arrays = make_arrays(num_examples)
    batches[:] = cut(arrays, 3)

    assert_exact(evaluation, arrays)


def test_batches_of_unequal_sizes_are_counted_once():
    evaluation, batches = make_evaluation(4)
    arrays = make_arrays(20)
    ends = np.cumsum([4, 1, 9, 0, 4, 2])
    batches[:] = [
        {name: array[stop - size : stop] for name, array in arrays.items()}
        for stop, size in zip(ends, [4, 1, 9, 0, 4, 2], strict=True)
    ]

    assert_exact(evaluation, arrays)
