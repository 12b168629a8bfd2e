"""Proof: how steps are divided into loops and chunks changes no bit of the state."""

import functools
import itertools

import optax
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.problems import (
    CNN,
    MLP,
    Classifier,
    Snapshot,
    assert_identical,
    find_changed,
    make_strategy,
    read_state,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]

NUM_STEPS = 50
MODELS = {"mlp": MLP, "cnn": CNN}


@functools.cache
def make_run(model, **options):
    """Returns a trainer, compiled once, and a snapshot of its start."""
    trainer = Classifier(
        make_strategy(4), MODELS[model](nnx.Rngs(0)), optax.adam(1e-2), **options
    )
    return trainer, Snapshot(trainer)


def train(run, sizes):
    """Returns the state and the data position after loops of the given sizes."""
    trainer, start = run
    start.restore()
    for size in sizes:
        trainer.train(size)
    assert trainer.optimizer.step[...] == NUM_STEPS
    return read_state(trainer), trainer.train_dataset.get_state()


@functools.cache
def get_reference(model):
    return train(make_run(model), [NUM_STEPS])


def assert_same_as_reference(model, run, sizes):
    state, position = train(run, sizes)
    expected, expected_position = get_reference(model)
    assert_identical(state, expected)
    assert position == expected_position


@pytest.mark.parametrize(
    "options",
    [*({"steps_per_chunk": size} for size in (1, 3, 7, 100)), {"compile_loop": False}],
    ids=str,
)
@pytest.mark.parametrize("model", MODELS)
def test_chunks_and_loops_of_any_size_give_identical_state(model, options):
    run = make_run(model, **options)

    for steps_per_loop in (1, 5, 50):
        sizes = [steps_per_loop] * (NUM_STEPS // steps_per_loop)
        assert_same_as_reference(model, run, sizes)


def test_the_reference_moves_every_kind_of_state():
    trainer, start = make_run("mlp")
    start.restore()
    before = read_state(trainer)

    after, _ = get_reference("mlp")

    # The stored keys stay; the rest must have moved.
    assert before.keys() - find_changed(before, after) == {"model/dropout/rngs/key"}


def test_chunks_limited_by_memory_give_identical_state():
    run = make_run("mlp", max_chunk_bytes=3 * 16 * (64 + 1) * 4)

    assert_same_as_reference("mlp", run, [NUM_STEPS])


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    cuts=st.sets(st.integers(1, NUM_STEPS - 1), max_size=12),
    steps_per_chunk=st.sampled_from([3, 7, 100]),
)
def test_any_division_into_loops_gives_identical_state(cuts, steps_per_chunk):
    ends = [0, *sorted(cuts), NUM_STEPS]
    sizes = [stop - start for start, stop in itertools.pairwise(ends)]

    for model in MODELS:
        run = make_run(model, steps_per_chunk=steps_per_chunk)
        assert_same_as_reference(model, run, sizes)
