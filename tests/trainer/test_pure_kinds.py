"""Tests of the kinds of a pure step's state, for every library, on replicas."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import armillary
from armillary.errors import ReplicaMismatchError
from tests.problems import train_with_stops
from tests.tiers import slow_after_first
from tests.trainer import pure_programs
from tests.trainer.pure_programs import (
    NUM_REPLICAS,
    PROGRAMS,
    arrays_of,
    as_arrays,
    make_data,
    make_keras,
    make_program,
    make_trainer,
    train_by_hand,
)


@pytest.fixture
def program(request, name):
    return make_program(request, name)


@slow_after_first("name", PROGRAMS)
def test_batch_statistics_are_averaged_without_a_word(name, program):
    trainer = make_trainer(program, NUM_REPLICAS)
    trainer.train(5)

    expected = train_by_hand(program, NUM_REPLICAS, 5)
    pairs = zip(arrays_of(trainer.state), arrays_of(expected), strict=True)
    for actual, wanted in pairs:
        np.testing.assert_allclose(actual, wanted, rtol=2e-4, atol=1e-5)
    first = arrays_of(program.statistics(as_arrays(program.state)))
    moved = zip(first, arrays_of(program.statistics(trainer.state)), strict=True)
    assert not all(np.array_equal(a, b) for a, b in moved)


@slow_after_first("name", PROGRAMS)
def test_one_device_equals_plain_jax(name, program):
    trainer = make_trainer(program)
    trainer.train(2)
    trainer.train(3)
    expected = train_by_hand(program, 1, 5)
    pairs = zip(arrays_of(trainer.state), arrays_of(expected), strict=True)
    for actual, wanted in pairs:
        # Processors round differently, in arrays with values up to 6.
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@slow_after_first("name", PROGRAMS)
def test_a_stopped_run_continues_bit_for_bit(name, request, tmp_path):
    def run(directory, *stops):
        trainer = train_with_stops(
            lambda: make_trainer(make_program(request, name), 2), directory, stops
        )
        return arrays_of(trainer.state)

    pairs = zip(run(tmp_path / "a", 9), run(tmp_path / "b", 3, 9), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


@slow_after_first("name", ["nnx", "equinox ema", "keras"])
def test_a_sharded_state_equals_the_state_of_one_device(name, program):
    devices = jax.devices()[:4]
    rules = {"first/kernel": PartitionSpec(None, "fsdp")} if name == "nnx" else None
    trainer = armillary.StepTrainer(
        program.step,
        program.state,
        make_data(),
        strategy=armillary.ShardedStrategy({"data": 2, "fsdp": 2}, rules, devices),
    )
    trainer.train(4)
    expected = train_by_hand(program, 1, 4)
    pairs = zip(arrays_of(trainer.state), arrays_of(expected), strict=True)
    for actual, wanted in pairs:
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)
    if name == "nnx":
        kernel = trainer.state[0]["first"]["kernel"][...]
        assert kernel.sharding.spec == PartitionSpec(None, "fsdp")


@pytest.mark.usefixtures("keras")
def test_an_unreduced_gradient_of_keras_is_refused(monkeypatch):
    program = make_keras()
    monkeypatch.setattr(pure_programs, "mean_over_replicas", lambda tree: tree)
    with pytest.raises(ReplicaMismatchError, match="all_reduce") as caught:
        make_trainer(program, 2).train(1)
    assert "state[0][0] ('sequential" in str(caught.value)
    assert "kinds=" not in str(caught.value)
