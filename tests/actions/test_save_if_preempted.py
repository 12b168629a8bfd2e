"""Tests of `SaveCheckpointIfPreempted`, in one process and in simulated ones."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from armillary import AbstractEvaluator, AbstractTrainer, Controller
from armillary.actions import SaveCheckpointIfPreempted
from armillary.checkpoint import Checkpoint, CheckpointManager, _writer
from armillary.cluster import TerminationConfig
from armillary.errors import CheckpointError
from armillary.goodput import read_goodput
from armillary.launch import ExitCode
from tests.patience import patience


class Run(AbstractTrainer, AbstractEvaluator):
    """A job whose state is a step; at some of them something happens."""

    def __init__(self, **events: Callable[[], Any]) -> None:
        self.step = nnx.Variable(jnp.zeros((), jnp.int32))
        self.events = {int(name[3:]): event for name, event in events.items()}

    def train(self, num_steps):
        for _ in range(num_steps):
            self.step.set_value(self.step.get_value() + 1)
            self.events.get(int(self.step.get_value()), int)()

    def evaluate(self, num_steps):
        return {}


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def make_manager(run: Run, directory: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(Checkpoint(step=run.step), directory, **options)


@contextlib.contextmanager
def training(
    run: Run, manager: CheckpointManager, config: Any = None
) -> Iterator[Controller]:
    """Yields a controller that has the action, in loops of two steps."""
    with SaveCheckpointIfPreempted(manager, config) as action:
        yield Controller(
            trainer=run,
            evaluator=run,
            global_step=run.step,
            steps_per_loop=2,
            checkpoint_manager=manager,
            train_actions=[action],
            eval_actions=[action],
        )


def end_of(run: Run, manager: CheckpointManager, config: Any = None) -> Any:
    """Returns the exit code with which training ends."""
    with training(run, manager, config) as controller, pytest.raises(SystemExit) as end:
        controller.train(100)
    return end.value.code


def saved_names(manager: CheckpointManager) -> list[str]:
    return [Path(path).name for path in manager.checkpoints]


def read_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if line.startswith("preempted:")]


def test_a_signal_ends_the_program_with_77_after_the_loop(tmp_path, caplog):
    caplog.set_level("INFO", logger="armillary")
    run = Run(at_5=terminate)
    manager = make_manager(run, tmp_path, checkpoint_interval=4)
    assert end_of(run, manager) == ExitCode.PREEMPTED == 77
    assert saved_names(manager) == ["checkpoint_2", "checkpoint_6"]
    assert read_messages(caplog) == [
        f"preempted: SIGTERM; saved {tmp_path}/checkpoint_6; ends with exit code 77 "
        "(PREEMPTED)."
    ]
    assert not [record for record in caplog.records if record.levelname != "INFO"]


def test_the_same_program_continues_from_there_and_ends_well(tmp_path):
    run = Run(at_5=terminate)
    manager = make_manager(run, tmp_path)
    with training(run, manager) as controller, pytest.raises(SystemExit):
        controller.train(8)
    again = Run()
    with training(again, make_manager(again, tmp_path)) as controller:
        assert int(again.step.get_value()) == 6
        controller.train(8)
    # The end of the machine was not the end of the run.
    goodput = read_goodput(tmp_path)
    assert (goodput.num_attempts, goodput.num_steps) == (2, 8)
    assert goodput.num_lost_steps == 0


ENDING = """
import atexit, os, signal, sys
import armillary
import jax.numpy as jnp

def terminate():
    os.kill(os.getpid(), signal.SIGTERM)

def main():
    atexit.register(terminate)
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(x={"x": jnp.zeros(3)}), sys.argv[1])
    with armillary.actions.SaveCheckpointIfPreempted(manager) as save_if_preempted:
        terminate()
        try:
            save_if_preempted()
        finally:
            terminate()

main()
"""


@pytest.mark.slow
def test_a_signal_while_the_program_ends_does_not_change_its_exit_code(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", ENDING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert result.returncode == 77, result.stderr
    assert (tmp_path / "checkpoint_1").is_dir()


def test_a_save_in_the_background_is_complete_before_the_next_one(
    tmp_path, monkeypatch
):
    write, is_released = _writer.write_folder, threading.Event()

    def write_slowly(*args: Any, **kwargs: Any) -> Callable[[], None]:
        wait = write(*args, **kwargs)

        def wait_slowly() -> None:
            assert is_released.wait(patience(120))
            wait()

        return wait_slowly

    monkeypatch.setattr(_writer, "write_folder", write_slowly)

    def terminate_while_saving() -> None:
        assert not saved_names(manager)
        terminate()
        threading.Timer(0.2, is_released.set).start()

    run = Run(at_3=terminate_while_saving)
    manager = make_manager(run, tmp_path, checkpoint_interval=6)
    assert end_of(run, manager) == 77
    assert saved_names(manager) == ["checkpoint_2", "checkpoint_4"]
    again = Run()
    assert make_manager(again, tmp_path).restore_or_initialize()
    assert int(again.step.get_value()) == 4


def test_a_step_is_not_saved_twice(tmp_path, caplog):
    caplog.set_level("INFO", logger="armillary")
    run = Run()
    run.evaluate = lambda num_steps: terminate()
    manager = make_manager(run, tmp_path, checkpoint_interval=2)
    with training(run, manager) as controller, pytest.raises(SystemExit) as caught:
        controller.train_and_evaluate(100, eval_interval=4)
    assert caught.value.code == 77
    # `checkpoint_4.1` would be a second one.
    assert saved_names(manager) == ["checkpoint_2", "checkpoint_4"]
    assert f"saved {tmp_path}/checkpoint_4;" in read_messages(caplog)[0]


def test_training_that_continues_saves_once_for_each_notice(tmp_path, caplog):
    caplog.set_level("INFO", logger="armillary")
    before, calls = signal.getsignal(signal.SIGTERM), []
    run = Run(at_1=terminate, at_2=terminate, at_5=terminate)
    manager = make_manager(run, tmp_path)
    config = TerminationConfig(exit_fn=lambda: calls.append("exit"))
    with training(run, manager, config) as controller:
        controller.train(8)

    assert signal.getsignal(signal.SIGTERM) is before
    assert saved_names(manager) == ["checkpoint_2", "checkpoint_6", "checkpoint_8"]
    assert [line.partition("; ")[2] for line in read_messages(caplog)] == [
        f"saved {tmp_path}/checkpoint_{step}; calls `exit_fn`." for step in (2, 6)
    ]
    assert calls == ["exit", "exit"]


def fail_to_save(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    write = _writer.write_folder

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    def write_and_fail(*args: Any, **kwargs: Any) -> Callable[[], None]:
        wait = write(*args, **kwargs)
        return lambda: fail(wait())

    replacement = fail if method == "write" else write_and_fail
    monkeypatch.setattr(_writer, "write_folder", replacement)


# At once, or in the background.
@pytest.mark.parametrize("method", ["write", "wait"])
def test_a_failed_save_is_reported_and_is_not_a_preemption(
    tmp_path, monkeypatch, caplog, method
):
    fail_to_save(monkeypatch, method)
    run = Run(at_1=terminate)
    manager = make_manager(run, tmp_path)
    error = pytest.raises(CheckpointError, match="No space left on device")
    with training(run, manager) as controller, error:
        controller.train(100)
    assert read_messages(caplog) == ["preempted: SIGTERM, but this step is not saved."]
    assert "after the last loop" not in caplog.text


def test_a_signal_after_the_last_loop_is_reported(tmp_path, caplog):
    run = Run()
    with training(run, make_manager(run, tmp_path)) as controller:
        controller.train(2)
        terminate()
    assert "SIGTERM came after the last loop, so nothing was saved" in caplog.text
