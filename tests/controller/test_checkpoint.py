"""Tests of a `Controller` that saves, restores and resumes."""

import os
import platform
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
from armillary import Controller
from armillary.checkpoint import Checkpoint, CheckpointManager
from armillary.errors import CheckpointError
from tests.controller.checkpoint_runs import Run, make_controller, saved_steps


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


def test_an_evaluation_may_delete_a_saved_array_that_it_replaces(tmp_path):
    class Replacing(Run):
        def evaluate(self, num_steps):
            total = self.total.get_value()
            self.total.set_value(total + 1)
            total.delete()  # A compiled step does this, too.
            return {}

    controller = make_controller(Replacing(), tmp_path)
    controller.train_and_evaluate(train_steps=8, eval_interval=4)

    newest = Path(controller.checkpoint_manager.checkpoints[-1]).name
    assert newest == "checkpoint_8.1"


def test_changes_of_an_evaluation_that_fails_are_saved_by_the_next_call(tmp_path):
    run = Run()
    errors = [RuntimeError("no answer")]

    def change(output):
        run.total.set_value(run.total.get_value() + 1)

    def fail_once(output):
        if errors:
            raise errors.pop()

    controller = make_controller(run, tmp_path, eval_actions=[change, fail_once])
    with pytest.raises(RuntimeError, match="no answer"):
        controller.train_and_evaluate(train_steps=4)
    controller.train_and_evaluate(train_steps=4)

    restored = Run()
    checkpoint = Checkpoint(step=restored.step, total=restored.total)
    checkpoint.read(controller.checkpoint_manager.latest_checkpoint)
    assert restored.total.get_value() == run.total.get_value()


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
