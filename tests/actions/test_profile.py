"""Tests that `Profile` traces whole loops, and never leaves a trace running."""

import gzip
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from armillary import Controller, StandardTrainer, create_global_step
from armillary.actions import ConditionalAction, Profile
from armillary.data import from_arrays


class Trainer(StandardTrainer):
    def __init__(self):
        data = {"x": np.ones((8, 4), np.float32)}
        super().__init__(from_arrays(data, batch_size=8, repeat=True))
        self.step, self.total = create_global_step(), jnp.zeros(())

    def train_step(self, iterator):
        self.total = self.total + next(iterator)["x"].sum()
        self.step[...] += 1


def make_controller(*actions, trainer=None):
    trainer = trainer or Trainer()
    return Controller(
        trainer=trainer,
        global_step=trainer.step,
        steps_per_loop=5,
        train_actions=actions,
    )


def read_steps(directory):
    """Returns the steps at which traced loops began, with JAX's own reader."""
    steps = []
    with warnings.catch_warnings():
        # Python 3.13 warns of a type of the reader, which aborts at an error.
        warnings.simplefilter("ignore", DeprecationWarning)
        for file in directory.glob("plugins/profile/*/*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                events = [event for line in plane.lines for event in line.events]
                found = [dict(event.stats) for event in events if event.name == "train"]
                steps += [stats["step_num"] for stats in found]
    return sorted(steps)


def is_tracing():
    try:
        jax.profiler.stop_trace()
    except RuntimeError:
        return False
    return True


def test_whole_loops_are_traced(tmp_path, caplog):
    caplog.set_level("INFO", "armillary")
    profile = Profile(at=8, steps=7, directory=tmp_path)
    # An action that holds it hands on what the controller tells it.
    make_controller(ConditionalAction(lambda output: True, profile)).train(40)

    # It begins after step 10, and two loops have the seven steps.
    assert read_steps(tmp_path) == [10, 15]
    assert not is_tracing()
    assert f"traced steps 10 to 20: {tmp_path}" in caplog.messages
    # The form that Perfetto opens.
    (trace,) = tmp_path.glob("plugins/profile/*/*.trace.json.gz")
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def test_a_trace_at_step_0_begins_after_the_first_loop(tmp_path):
    make_controller(Profile(at=0, steps=5, directory=tmp_path)).train(20)
    assert read_steps(tmp_path) == [5]


def test_the_trace_ends_with_training_and_with_an_exception(tmp_path):
    make_controller(Profile(at=5, steps=1000, directory=tmp_path / "a")).train(15)
    assert read_steps(tmp_path / "a") == [5, 10]
    assert not is_tracing()
    trainer = Trainer()

    def fail(output):
        if trainer.step[...] == 10:
            raise ValueError("the disk is full")

    profile = Profile(at=5, steps=1000, directory=tmp_path / "b")
    with pytest.raises(ValueError, match="the disk is full"):
        make_controller(profile, fail, trainer=trainer).train(15)
    assert read_steps(tmp_path / "b") == [5]
    assert not is_tracing()


def test_a_run_that_resumes_later_is_not_traced_again(tmp_path):
    trainer = Trainer()
    trainer.train(10)
    make_controller(Profile(at=10, steps=5, directory=tmp_path), trainer=trainer).train(
        20
    )
    assert read_steps(tmp_path) == []


def test_only_the_first_of_several_processes_traces(tmp_path, monkeypatch):
    process = type("Process", (), {"is_chief": False})
    monkeypatch.setattr("armillary.actions._profile.get_process", process)
    make_controller(Profile(at=5, steps=5, directory=tmp_path)).train(20)
    assert read_steps(tmp_path) == []


def test_two_traces_at_the_same_time_are_an_error(tmp_path):
    first = Profile(at=5, steps=20, directory=tmp_path)
    second = Profile(at=10, steps=5, directory=tmp_path)

    with pytest.raises(RuntimeError, match="already been started"):
        make_controller(first, second).train(40)
    assert not is_tracing()
