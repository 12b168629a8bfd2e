"""Tests of a `Controller` that saves, restores, resumes and watches checkpoints."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import armillary
from armillary.checkpoint import Checkpoint, CheckpointManager
from armillary.controller import _directory
from armillary.controller._controller import Controller
from armillary.errors import CheckpointDamageError, CheckpointError
from armillary.trainer._contract import AbstractEvaluator, AbstractTrainer


class Run(AbstractTrainer, AbstractEvaluator):
    """A job whose state is a step and a sum of all steps."""

    def __init__(self, fail_at=None):
        self.step = nnx.Variable(jnp.zeros((), jnp.int32))
        self.total = nnx.Variable(jnp.zeros((), jnp.int32))
        self.fail_at = fail_at
        self.num_loops = 0
        self.evaluated = []

    def train(self, num_steps):
        for _ in range(num_steps):
            self.step.set_value(self.step.get_value() + 1)
            self.total.set_value(self.total.get_value() + self.step.get_value())
            if self.step.get_value() == self.fail_at:
                raise RuntimeError("out of memory")
        self.num_loops += 1
        return {"total": self.total.get_value()}

    def evaluate(self, num_steps):
        self.evaluated.append(int(self.step.get_value()))
        return {"total": self.total.get_value()}


def make_controller(run, directory, manager_options=None, objects=None, **options):
    checkpoint = Checkpoint(step=run.step, total=run.total, **(objects or {}))
    manager = CheckpointManager(
        checkpoint, directory, **{"checkpoint_interval": 4, **(manager_options or {})}
    )
    return Controller(
        trainer=run,
        evaluator=run,
        global_step=run.step,
        steps_per_loop=2,
        checkpoint_manager=manager,
        **options,
    )


def saved_steps(controller):
    manager = controller.checkpoint_manager
    names = [Path(path).name for path in manager.checkpoints]
    return [int(name.removeprefix("checkpoint_").partition(".")[0]) for name in names]


class Descent(armillary.StandardTrainer):
    """Replaces a dictionary of arrays, as steps of Optax do."""

    def __init__(self, params):
        super().__init__([jnp.ones(2)] * 4)
        self.params, self.step = params, armillary.create_global_step()

    def train_step(self, iterator):
        mean = next(iterator).mean()
        self.params = {name: value - mean for name, value in self.params.items()}
        self.step[...] += 1


def test_a_dictionary_that_steps_replace_is_called_missing(tmp_path, caplog):
    params = {"w": jnp.ones(3), "b": jnp.zeros(())}
    trainer = Descent(params)
    Controller(
        trainer=trainer,
        global_step=trainer.step,
        steps_per_loop=2,
        checkpoint_manager=CheckpointManager(
            Checkpoint(params=params, step=trainer.step), tmp_path
        ),
    )
    assert "leaves out 2 arrays of the trainer" in caplog.text
    assert "\n  params/b\n  params/w\n" in caplog.text


def test_missing_parts_of_a_trainer_in_a_checkpoint_are_warned_of_once(
    tmp_path, caplog
):
    trainer = Descent({"w": jnp.ones(3)})
    trainer.mean = nnx.metrics.Average("x")  # Begins again in each loop.
    for objects in ({"step": trainer.step}, {"trainer": trainer}):
        manager = CheckpointManager(
            Checkpoint(**objects), tmp_path / str(len(caplog.text))
        )
        controller = Controller(
            trainer=trainer,
            global_step=trainer.step,
            steps_per_loop=1,
            checkpoint_manager=manager,
        )
        controller.train(int(trainer.step[...]) + 1)
        controller.save_checkpoint()
    assert caplog.text.count("leaves out 1 array of the trainer") == 1
    assert "\n  params/w\n" in caplog.text
    lost = "No checkpoint holds the position in the training data (iterable list)"
    assert caplog.text.count(lost) == 1


class Counting(Descent):
    """Trains on batches of a generator, which has no position."""

    def __init__(self):
        super().__init__({"w": jnp.ones(3)})
        self.train_dataset = self.dataset = self.generate

    def generate(self):
        for _ in range(9):
            yield jnp.ones(2)


@pytest.mark.parametrize("is_whole", [True, False])
def test_data_without_a_position_is_warned_of_in_the_first_loop(
    tmp_path, caplog, is_whole
):
    def note_loop(output):
        warned.append("docs/data/positions.md" in caplog.text)

    warned = []
    trainer = Counting()
    objects = {"trainer": trainer} if is_whole else {"step": trainer.step}
    controller = Controller(
        trainer=trainer,
        global_step=trainer.step,
        steps_per_loop=2,
        train_actions=[note_loop],
        checkpoint_manager=CheckpointManager(Checkpoint(**objects), tmp_path),
    )
    assert "position" not in caplog.text

    controller.train(4)

    assert warned == [True, True]
    lost = "No checkpoint holds the position in the training data (generator function)"
    assert caplog.text.count(lost) == 1


@pytest.mark.parametrize("saves_data", [True, False])
def test_a_position_that_a_checkpoint_leaves_out_is_warned_of_in_the_first_loop(
    tmp_path, caplog, saves_data
):
    rows = np.ones((8, 2), np.float32)
    data = armillary.data.from_arrays(rows, batch_size=2, repeat=True)
    objects = {"data": armillary.get_strategy().distribute_dataset(data)}

    def make_controller():
        trainer = Descent({"w": jnp.ones(3)})
        trainer.train_dataset = objects["data"]
        named = {**(objects if saves_data else {}), "step": trainer.step}
        return Controller(
            trainer=trainer,
            global_step=trainer.step,
            steps_per_loop=2,
            checkpoint_manager=CheckpointManager(Checkpoint(**named), tmp_path),
        )

    make_controller().train(4)
    left_out = "leaves out the position in the training data (arrays)"
    assert caplog.text.count(left_out) == (not saves_data)

    caplog.clear()
    make_controller().train(8)  # The restore has its own warning.
    assert caplog.text.count("the position of the training data is") == (not saves_data)
    assert left_out not in caplog.text


def test_without_checkpoints_data_needs_no_position(caplog):
    trainer = Counting()
    Controller(trainer=trainer, global_step=trainer.step, steps_per_loop=2).train(4)
    assert "position" not in caplog.text


class Sampler:
    def get_state(self):
        return 0

    def set_state(self, state):
        pass


@pytest.mark.parametrize("make_sampler", [Sampler, np.random.default_rng])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_state_that_a_trainer_holds_is_named_if_it_is_not_saved(
    tmp_path, caplog, is_named, make_sampler
):
    trainer = Descent({"w": jnp.ones(3)})
    trainer.sampler, trainer.data = make_sampler(), trainer.train_dataset
    named = {"sampler": trainer.sampler} if is_named else {}
    manager = CheckpointManager(Checkpoint(trainer=trainer, **named), tmp_path)
    Controller(
        trainer=trainer,
        global_step=trainer.step,
        steps_per_loop=1,
        checkpoint_manager=manager,
    )
    message = "Name it there: `Checkpoint(..., sampler=trainer.sampler)`."
    assert caplog.text.count(message) == (not is_named)
    assert caplog.text.count("leaves out") == (not is_named)


@pytest.mark.parametrize(
    ("interval", "steps"), [(4, [2, 6, 10, 12]), (1000, [2, 12]), (None, [10, 12])]
)
def test_saves_at_the_interval_and_at_the_end(tmp_path, caplog, interval, steps):
    caplog.set_level("INFO", "armillary")
    controller = make_controller(Run(), tmp_path, {"checkpoint_interval": interval})

    controller.train(10, checkpoint_at_completion=interval != 1000)
    controller.train(12)
    controller.train(12)  # A step is saved once.

    assert saved_steps(controller) == steps
    assert caplog.text.count("saving checkpoint to") == len(steps)


def ask(controller):
    controller.request_stop("x")


def ask_in_a_thread(controller):
    thread = threading.Thread(target=ask, args=(controller,))
    thread.start()
    thread.join()


def ask_in_a_signal_handler(controller):
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize("ask", [ask, ask_in_a_thread, ask_in_a_signal_handler])
def test_a_stop_request_from_anywhere_ends_the_loop_and_saves(tmp_path, ask):
    def stop(output):
        if output["total"] > 20:
            ask(controller)

    run = Run()
    options = {"checkpoint_interval": 1000}
    controller = make_controller(run, tmp_path, options, train_actions=[stop])
    previous = signal.signal(
        signal.SIGUSR1, lambda *_: controller.request_stop("signal 10")
    )
    try:
        controller.train(100, checkpoint_at_completion=False)
    finally:
        signal.signal(signal.SIGUSR1, previous)

    assert run.step.get_value() == 6
    assert saved_steps(controller)[-1] == 6


def test_exception_leaves_saves_on_disk(tmp_path):
    controller = make_controller(
        Run(fail_at=7), tmp_path / "run", summary_dir=tmp_path / "summaries"
    )

    with pytest.raises(RuntimeError, match="out of memory"):
        controller.train(10)

    run = Run()
    make_controller(run, tmp_path / "run")
    assert run.step.get_value() == 6
    events = EventAccumulator(str(tmp_path / "summaries")).Reload()
    assert [event.step for event in events.Scalars("total")] == [2, 4, 6]


@pytest.mark.parametrize("change", [0, 1])
def test_only_an_evaluation_that_changes_values_is_saved_again(tmp_path, change):
    class Moving(Run):
        def evaluate(self, num_steps):
            total = self.total.get_value()
            total = total + change if change else total
            self.total.set_value(jax.device_put(total, jax.devices()[1]))
            return {}

    run = Moving()
    controller = make_controller(run, tmp_path)
    controller.train_and_evaluate(train_steps=4)
    newest = Path(controller.checkpoint_manager.checkpoints[-1]).name
    assert newest == ("checkpoint_4.1" if change else "checkpoint_4")


HOLDER = """
import fcntl, os, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write(f"{os.getpid()} on {sys.argv[2]}")
file.flush()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("host", [platform.node(), "elsewhere"])
def test_two_processes_do_not_train_in_one_directory(tmp_path, caplog, host):
    command = [sys.executable, "-c", HOLDER, tmp_path / ".lock", host]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as holder:
        assert holder.stdout.readline() == b"ready\n"
        controller = make_controller(Run(), tmp_path)
        message = f"Process {holder.pid} "
        if host == "elsewhere":  # The lock of a machine that was lost may stay.
            controller.train(2)
            assert f"{message}on elsewhere trains" in caplog.text
        else:
            with pytest.raises(CheckpointError, match=f"{message}on this"):
                controller.train(2)
    controller.train(4)
    assert (tmp_path / ".lock").read_text() == f"{os.getpid()} on {platform.node()}"


def test_two_threads_do_not_train_in_one_directory(tmp_path):
    errors = []

    def train_beside(_):
        controller = make_controller(Run(), tmp_path)

        def train():
            with pytest.raises(CheckpointError, match="The thread 'MainThread' of"):
                controller.train(4)
            errors.append("refused")

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    controller = make_controller(Run(), tmp_path, train_actions=[train_beside])
    controller.train(2)

    assert errors == ["refused"]
    make_controller(Run(), tmp_path).train(4)


def test_save_checkpoint_always_writes(tmp_path):
    run = Run()
    controller = make_controller(run, tmp_path)

    path = controller.save_checkpoint()
    run.total.set_value(jnp.int32(7))
    again = controller.save_checkpoint()

    assert path == str(tmp_path / "checkpoint_0")
    assert controller.checkpoint_manager.checkpoints == [again]
    run.total.set_value(jnp.int32(0))
    assert controller.restore_checkpoint() is not None
    assert run.total.get_value() == 7
    # Training continues from a checkpoint that is given.
    controller.train(6)
    path = tmp_path / "checkpoint_4"
    assert controller.restore_checkpoint(path) == str(path)
    controller.train(8)
    assert run.total.get_value() == 7 + sum(range(9))
    assert controller.checkpoint_manager.latest_checkpoint.endswith("checkpoint_8")


def make_evaluation_job(directory, run, **options):
    checkpoint = Checkpoint(step=run.step, total=run.total)
    return Controller(
        evaluator=run,
        global_step=run.step,
        checkpoint_manager=CheckpointManager(checkpoint, directory),
        **options,
    )


def test_evaluates_every_checkpoint_of_another_job_once(tmp_path):
    training = make_controller(Run(), tmp_path)
    training.train(4)
    run = Run()

    def train_on(output):
        if run.evaluated == [2]:
            training.train(12)

    evaluation = make_evaluation_job(tmp_path, run, eval_actions=[train_on])
    output = evaluation.evaluate_continuously(timeout=0.05)

    assert run.evaluated == saved_steps(training) == [2, 4, 8, 12]
    assert output == {"total": sum(range(13))}


def test_a_checkpoint_that_is_damaged_or_deleted_meanwhile_is_skipped(
    tmp_path, monkeypatch, caplog
):
    make_controller(Run(), tmp_path, {"checkpoint_interval": 2}).train(8)
    (damaged,) = (tmp_path / "checkpoint_4").glob("arrays/manifest.ocdbt")
    damaged.write_bytes(damaged.read_bytes()[:20])
    run = Run()
    evaluation = make_evaluation_job(tmp_path, run)
    restore = evaluation.restore_checkpoint

    def delete_one(path):
        if str(path).endswith("checkpoint_6"):
            shutil.rmtree(path)
        return restore(path)

    monkeypatch.setattr(evaluation, "restore_checkpoint", delete_one)
    output = evaluation.evaluate_continuously(timeout=0)

    assert run.evaluated == [2, 8]
    assert output == {"total": sum(range(9))}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert (
        f"`{tmp_path / 'checkpoint_4'}` is not evaluated: it is damaged: "
        "`arrays/manifest.ocdbt` has 20 bytes instead of"
    ) in caplog.text
    assert "checkpoint_6` is not evaluated: it was deleted meanwhile." in caplog.text


def test_an_error_of_an_evaluation_is_no_damage(tmp_path):
    make_controller(Run(), tmp_path).train(2)

    def fail(output):
        raise CheckpointDamageError("of something else")

    evaluation = make_evaluation_job(tmp_path, Run(), eval_actions=[fail])

    with pytest.raises(CheckpointDamageError, match="of something else"):
        evaluation.evaluate_continuously(timeout=0)


def test_evaluation_ends_with_the_last_checkpoint_of_a_program_that_has_ended(tmp_path):
    training = make_controller(Run(), tmp_path, {"checkpoint_interval": 2})
    training.train(4)
    run = Run()

    def train_on(output):
        if run.evaluated == [2, 4]:
            training.train(6)
            assert not (tmp_path / "DONE").exists()
            training.train(8)
            # The program that trains would end now.
            _directory.announce_ends()

    evaluation = make_evaluation_job(tmp_path, run, eval_actions=[train_on])
    evaluation.evaluate_continuously()

    assert run.evaluated == [2, 4, 6, 8]
    assert json.loads((tmp_path / "DONE").read_text())["step"] == 8


def test_training_that_continues_or_fails_is_not_over(tmp_path):
    training = make_controller(Run(), tmp_path, {"checkpoint_interval": 2})
    training.train(2)
    _directory.announce_ends()
    assert (tmp_path / "DONE").exists()

    def fail(output):
        assert not (tmp_path / "DONE").exists()
        raise SystemExit(77)

    failing = make_controller(Run(), tmp_path, train_actions=[fail])
    with pytest.raises(SystemExit):
        failing.train(4)
    _directory.announce_ends()
    assert not (tmp_path / "DONE").exists()


def test_evaluating_writes_nothing_next_to_the_checkpoints(tmp_path):
    make_controller(
        Run(), tmp_path, {"checkpoint_interval": 1, "max_to_keep": 9}
    ).train(6)
    unfinished = tmp_path / "checkpoint_7.orbax-checkpoint-tmp"
    unfinished.mkdir()
    before = list_files(tmp_path)
    run = Run()
    # One script for all roles: the same manager, which would keep fewer.
    evaluation = make_controller(run, tmp_path, {"max_to_keep": 1})

    evaluation.evaluate_continuously(until_step=6)
    evaluation.checkpoint_manager.close()

    assert run.evaluated == [2, 4, 6]
    assert list_files(tmp_path) == before


def list_files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_run_that_goes_back_runs_its_periodic_actions_again(tmp_path):
    steps, run = [], Run()
    note = armillary.actions.PeriodicAction(
        lambda _: steps.append(int(run.step.get_value())), 4
    )
    options = {"checkpoint_interval": 2}
    controller = make_controller(run, tmp_path, options, train_actions=[note])
    controller.train(8)
    controller.restore_checkpoint(tmp_path / "checkpoint_2")
    controller.train(8)
    assert steps == [4, 8, 4, 8]


def test_a_run_of_whole_epochs_saves_and_resumes_where_they_end(tmp_path):
    class Epochs(Run):
        def train(self, num_steps):
            return super().train(7 * num_steps)

    def start(run):
        return make_controller(run, tmp_path, {"checkpoint_interval": 10})

    controller = start(Epochs(fail_at=25))
    with pytest.raises(RuntimeError, match="out of memory"):
        controller.train_and_evaluate(train_steps=40, eval_interval=20)

    # Loops of two epochs end at 14, 28 and 42; the first save is due immediately.
    assert controller.trainer.evaluated == []
    run = Epochs()
    controller = start(run)
    assert int(run.step.get_value()) == 14
    controller.train_and_evaluate(train_steps=40, eval_interval=20)
    assert run.evaluated == [28, 42]
    assert int(run.total.get_value()) == sum(range(43))

    run = Epochs()
    output = start(run).train_and_evaluate(train_steps=40, eval_interval=20)
    assert run.evaluated == [42]
    assert output == {"total": sum(range(43))}
