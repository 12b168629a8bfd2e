"""Tests that `Controller` accounts for all its time, also across a `kill -9`."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary.goodput import Category, _journal, _stopwatch, read_goodput
from armillary.report._run_files import read_run
from tests.goodput.conftest import FakeClock
from tests.patience import patience
from tests.recovery.soak import MAX_UNKNOWN, audit


class Clock(FakeClock):
    """Moves a little each time it is read, so that everything takes time."""

    def __call__(self):
        self.now += 1e-6
        return self.now


CLOCK = Clock()


def spend(seconds):
    """Lets time pass: for the clock that a test may have, and for real."""
    CLOCK.now += seconds
    time.sleep(seconds)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(_stopwatch, "_now", CLOCK)
    monkeypatch.setattr(
        _journal, "time", SimpleNamespace(**{**vars(time), "time": CLOCK})
    )
    return CLOCK


class Loops(armillary.AbstractTrainer, armillary.AbstractEvaluator):
    """Sleeps for its steps and its evaluations."""

    def __init__(self):
        self.step = jnp.int32(0)

    def train(self, num_steps):
        spend(0.01 * num_steps)
        self.step = self.step + num_steps
        return {"step": self.step}

    def evaluate(self, num_steps):
        spend(0.1)
        return {"step": self.step}


def make_controller(directory, **options):
    loops = Loops()
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(loops=loops), directory, checkpoint_interval=10
    )
    arguments = {
        "trainer": loops,
        "evaluator": loops,
        "global_step": lambda: loops.step,
        "steps_per_loop": 5,
        "checkpoint_manager": manager,
    }
    return armillary.Controller(**{**arguments, **options})


def test_a_run_is_accounted_for_in_the_directory_of_its_checkpoints(tmp_path, clock):
    controller = make_controller(tmp_path, train_actions=[lambda output: spend(0.02)])
    start = clock.now
    controller.train_and_evaluate(40, eval_interval=20)
    elapsed = clock.now - start

    goodput = read_goodput(tmp_path)
    seconds = goodput.seconds
    spent = {
        Category.STEPPING: 0.4,
        Category.EVALUATING: 0.2,
        Category.OTHER: 8 * 0.02,
    }
    # JAX says itself how long a compilation took, which is no part of the others.
    found = seconds[Category.COMPILING] + sum(map(seconds.get, spent))
    assert found == pytest.approx(sum(spent.values()), rel=0.01)
    for category, most in spent.items():
        assert 0 < seconds[category] < 1.01 * most
    assert seconds[Category.SAVING] > 0
    assert seconds[Category.LOST] == seconds[Category.DOWN] == 0
    before = seconds[Category.START_UP] + seconds[Category.RESTORING]
    assert goodput.total_seconds - before == pytest.approx(elapsed, rel=0.01)
    assert (goodput.num_attempts, goodput.num_steps) == (1, 40)


@pytest.mark.parametrize("stops", [False, True])
def test_the_next_controller_is_another_attempt_of_the_run(tmp_path, stops):
    def stop(output):
        if stops:
            controller.request_stop("preempted")

    controller = make_controller(tmp_path, train_actions=[stop])
    controller.train(20)
    controller.save_checkpoint()  # It changes nothing about the end.
    states = [read_run(tmp_path).state]
    time.sleep(0.2)
    make_controller(tmp_path).train(40)
    states.append(read_run(tmp_path).state)

    goodput = read_goodput(tmp_path)

    assert states == ["stopped" if stops else "done", "done"]
    assert (goodput.num_attempts, goodput.num_steps) == (2, 40)
    assert goodput.seconds[Category.RESTORING] > 0
    assert goodput.num_lost_steps == 0
    # The time after a stop request is lost, that after the end of training is not.
    assert (goodput.seconds[Category.DOWN] >= 0.2) == stops


class Matrices(armillary.StandardTrainer):
    """Keeps the device busy."""

    def __init__(self, data):
        super().__init__(data)
        self.step, self.value = jnp.int32(0), jnp.eye(256)

    def train_step(self, iterator):
        matrix = next(iterator)["x"]
        self.value = jax.lax.fori_loop(
            0, 500, lambda _, value: value @ matrix, self.value
        )
        self.step = self.step + 1


@pytest.mark.slow
def test_summaries_that_hide_behind_the_device_are_stepping(tmp_path):
    summary_seconds = patience(0.05)

    class SlowSummaries(armillary.summary.SummaryManager):
        def write_summaries(self, values, *, step):
            time.sleep(summary_seconds)

    data = armillary.data.from_arrays(
        {"x": np.eye(256, dtype=np.float32)}, batch_size=256, repeat=True
    )
    trainer = Matrices(data)
    controller = make_controller(
        tmp_path,
        trainer=trainer,
        global_step=lambda: trainer.step,
        steps_per_loop=1,
        summary_manager=SlowSummaries(None),
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer), tmp_path, max_to_keep=1
        ),
    )
    controller.train(12)

    seconds = read_goodput(tmp_path).seconds
    # The first and the last loop are looked at while nothing else runs.
    assert 2 * summary_seconds <= seconds[Category.OTHER] < 6 * summary_seconds
    assert seconds[Category.COMPILING] > 0
    assert seconds[Category.DATA] < 0.05 * seconds[Category.STEPPING]


PROGRAM = """
import os, signal, sys, time
import jax.numpy as jnp, numpy as np
import armillary

directory, kill_at = sys.argv[1], int(sys.argv[2])

def read():
    for number in range(10_000):
        time.sleep(0.05)
        yield {"x": np.full(2, number, "float32")}

class Trainer(armillary.StandardTrainer):
    def __init__(self):
        # Loops of a quarter of a second: each one gets a line.
        super().__init__(read, armillary.StandardTrainerOptions(steps_per_chunk=5))
        self.step, self.total = jnp.int32(0), jnp.zeros(())

    def train_step(self, iterator):
        self.total = self.total + next(iterator)["x"].sum()
        self.step = self.step + 1

    def train_loop_end(self):
        return {"step": self.step}

class Evaluator(armillary.AbstractEvaluator):
    def evaluate(self, num_steps):
        time.sleep(0.2)

def act(output):
    time.sleep(0.02)
    if output["step"] == kill_at:
        controller.checkpoint_manager.sync()
        os.kill(os.getpid(), signal.SIGKILL)

trainer = Trainer()
controller = armillary.Controller(
    trainer=trainer, evaluator=Evaluator(), global_step=lambda: trainer.step,
    steps_per_loop=5, train_actions=[act],
    checkpoint_manager=armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer), directory, checkpoint_interval=10),
)
controller.train_and_evaluate(60, eval_interval=20)
print(time.time())
"""


@pytest.mark.slow
def test_totals_of_a_killed_and_restarted_run_add_up_to_the_wall_time(tmp_path):
    def run(kill_at):
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path), str(kill_at)],
            stdout=subprocess.PIPE,
            text=True,
            timeout=patience(120),
            env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"},
        )

    start = time.time()
    assert run(kill_at=35).returncode == -signal.SIGKILL
    time.sleep(1.0)
    end = float(run(kill_at=-1).stdout)

    goodput = read_goodput(tmp_path)
    seconds = goodput.seconds
    # From the first line of the journal to the last, nothing is missing or twice there.
    assert audit(tmp_path) < MAX_UNKNOWN
    assert goodput.total_seconds < 1.01 * (end - start)
    assert (goodput.num_attempts, goodput.num_steps) == (2, 60)
    assert goodput.num_lost_steps == 10
    # Some batches of the lost steps were read ahead, during the evaluation.
    assert seconds[Category.LOST] >= 2 * 0.02
    assert seconds[Category.DOWN] >= 1.0
    # On a busy machine, only the first batch of each attempt has to be waited for.
    assert seconds[Category.DATA] >= 2 * 0.05
    assert seconds[Category.EVALUATING] >= 3 * 0.2
    assert seconds[Category.OTHER] >= 12 * 0.02
    started = (Category.START_UP, Category.COMPILING)
    for category in (*started, Category.SAVING, Category.RESTORING):
        assert seconds[category] > 0
