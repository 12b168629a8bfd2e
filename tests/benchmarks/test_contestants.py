"""Tests that all contestants compute the same numbers, so the comparison is fair."""

import jax
import numpy as np
import pytest

import armillary
from benchmarks.contestants import make_contestant
from benchmarks.contestants.rows import SHUFFLE_SEED, read_batches
from benchmarks.protocol import Options, UnsupportedError
from benchmarks.tasks import make_task

OWN = ("reference-step", "reference-scan", "armillary")


def losses(name: str, task: str, bursts: int = 3, **options) -> list[float]:
    contestant = make_contestant(name)
    contestant.setup(make_task(task, "small"), Options(steps_per_loop=4, **options))
    return [contestant.run(8) for _ in range(bursts)]


def assert_all_agree(task: str, **options) -> None:
    expected = losses(OWN[0], task, **options)
    assert all(np.isfinite(expected)) and len(set(expected)) == len(expected)
    for name in OWN[1:]:
        np.testing.assert_allclose(
            losses(name, task, **options), expected, rtol=2e-4, err_msg=name
        )


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mlp", "many-leaves", "cnn", "bert", "gpt"])
def test_all_contestants_reach_the_same_losses(task):
    assert_all_agree(task)


@pytest.mark.slow
def test_contestants_agree_on_several_devices():
    assert_all_agree("mlp", devices=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:grain")
def test_contestants_agree_with_data_from_grain():
    assert_all_agree("mlp", data="grain")


@pytest.mark.slow
def test_they_agree_with_data_on_the_device():
    assert_all_agree("mlp", data="resident")


def test_rows_come_in_the_order_of_from_arrays():
    task = make_task("mlp", "small")
    arrays = task.make_arrays()
    ours = read_batches(task, "memory")
    theirs = iter(
        armillary.data.from_arrays(
            arrays, batch_size=task.batch_size, shuffle_seed=SHUFFLE_SEED, repeat=True
        )
    )
    for _ in range(40):  # Three epochs, and batches that run across their ends.
        np.testing.assert_array_equal(next(ours)["image"], next(theirs)["image"])


def test_more_devices_than_there_are_is_unsupported():
    jax.devices()  # A contestant may ask for more of them until JAX has started.
    with pytest.raises(UnsupportedError, match=r"needs 64 devices.*`--devices"):
        losses("reference-step", "mlp", devices=64)


@pytest.mark.slow
def test_a_compiled_keras_model_trains_under_the_controller(keras):
    del keras
    found = losses("armillary-keras", "mlp")
    assert np.all(np.isfinite(found)) and found[-1] < found[0]
    with pytest.raises(UnsupportedError, match="has data in memory and f32 only"):
        losses("armillary-keras", "mlp", data="grain")
