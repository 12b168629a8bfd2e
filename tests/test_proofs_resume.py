"""Proof: a run that was stopped, or killed, ends as the one that was not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from tests.problems import (
    CNN,
    MLP,
    Classifier,
    assert_identical,
    make_strategy,
    make_training_data,
    read_state,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]

REPOSITORY = Path(__file__).resolve().parents[1]
NUM_STEPS = 50
# The data position lies in the middle of chunks and of epochs at every save.
PROGRAM = """
import sys
from tests.test_proofs_resume import run
run(*sys.argv[1:])
"""


def make_controller(directory, num_replicas, model, actions=(), interval=None):
    strategy = make_strategy(num_replicas)
    models = {"mlp": MLP, "cnn": CNN}
    trainer = Classifier(
        strategy,
        models[model](nnx.Rngs(0)),
        optax.adam(3e-3),
        make_training_data(strategy),
        steps_per_chunk=7,
    )
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer, data=trainer.train_dataset),
        directory,
        checkpoint_interval=interval,
    )
    return armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=strategy,
        steps_per_loop=4,
        train_actions=actions,
        checkpoint_manager=manager,
    )


def run(directory, output, model, interval):
    """Trains to the end in a process of its own, and writes the final state."""

    def report(_):
        print("loop", flush=True)  # noqa: T201

    controller = make_controller(directory, 4, model, [report], int(interval) or None)
    controller.train(NUM_STEPS)
    np.savez(output, **read_state(controller.trainer))


def start(directory, output, model, interval=0):
    """Starts `run` in a new process."""
    return subprocess.Popen(
        [
            *(sys.executable, "-c", PROGRAM),
            *(str(directory), str(output), model, str(interval)),
        ],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )


def finish(child):
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors


def train_without_stopping(directory, model):
    controller = make_controller(directory / "whole", 4, model)
    controller.train(NUM_STEPS)
    return controller.trainer


@pytest.mark.parametrize(("model", "num_steps"), [("mlp", 23), ("cnn", 10)])
def test_stop_and_resume_in_a_new_process_is_bit_identical(tmp_path, model, num_steps):
    whole = train_without_stopping(tmp_path, model)
    make_controller(tmp_path / "stopped", 4, model).train(num_steps)

    finish(start(tmp_path / "stopped", tmp_path / "final.npz", model))

    with np.load(tmp_path / "final.npz") as final:
        assert_identical(dict(final), read_state(whole))


@pytest.mark.parametrize("num_replicas", [1, 2, 8])
def test_resume_on_another_number_of_replicas_goes_on_alike(tmp_path, num_replicas):
    whole = train_without_stopping(tmp_path, "cnn")
    make_controller(tmp_path / "stopped", 4, "cnn").train(23)

    resumed = make_controller(tmp_path / "stopped", num_replicas, "cnn")
    resumed.train(NUM_STEPS)

    losses = np.asarray(resumed.trainer.losses)
    np.testing.assert_allclose(losses, np.asarray(whole.losses), rtol=1e-5)
    expected = read_state(whole)
    for path, value in read_state(resumed.trainer).items():
        if path.startswith("model/"):
            error = np.linalg.norm(value - expected[path])
            assert error <= 1e-5 * np.linalg.norm(expected[path]), path
    kernel = resumed.trainer.model.dense.kernel[...]
    assert len(kernel.sharding.device_set) == num_replicas


@pytest.mark.parametrize(("num_loops", "delay"), [(1, 0.0), (3, 0.02), (8, 0.05)])
def test_a_killed_run_resumes_bit_identically(tmp_path, num_loops, delay):
    whole = train_without_stopping(tmp_path, "mlp")
    child = start(tmp_path / "killed", tmp_path / "none.npz", "mlp", interval=4)
    try:
        for _ in range(num_loops):
            assert child.stdout.readline() == "loop\n"
        time.sleep(delay)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert not (tmp_path / "none.npz").exists()

    resumed = make_controller(tmp_path / "killed", 4, "mlp", interval=4)
    # A save begins after the one before is on disk, so only the last two can be lost.
    assert int(resumed.trainer.optimizer.step[...]) >= 4 * (num_loops - 2)
    resumed.train(NUM_STEPS)

    assert_identical(read_state(resumed.trainer), read_state(whole))


def test_restoring_compiles_nothing(tmp_path, no_retrace):
    controller = make_controller(tmp_path, 2, "mlp")
    controller.train(8)
    controller.train(12)
    expected = read_state(controller.trainer)
    first = controller.checkpoint_manager.checkpoints[0]
    controller.restore_checkpoint(first)
    controller.train(10)

    with no_retrace():
        controller.restore_checkpoint(first)
        controller.train(12, checkpoint_at_completion=False)

    assert_identical(read_state(controller.trainer), expected)
