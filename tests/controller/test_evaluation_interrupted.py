"""Tests that an interrupted run repeats or keeps each of its evaluations.

Each case interrupts a run at one point of the sequence train, evaluate, act and save,
and starts it again. The run must end like a run without interruption: with the same
arrays, actions, best model and kept checkpoints, and with one record of an evaluation.
"""

import contextlib
import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import armillary
from armillary.actions import (
    ConditionalAction,
    EarlyStopping,
    NewBestMetric,
    PeriodicAction,
    SaveCheckpointIfPreempted,
)
from armillary.checkpoint._writer import Writer, find_running
from armillary.data import from_arrays
from armillary.summary import read_metrics
from tests.tiers import slow_after_first

STEPS = 40
LOSSES = (1.0, 0.5, 0.7, 0.2, 0.3, 0.4, 0.1, 0.6, 0.05)


class KilledError(BaseException):
    """The end of the process: what it does from here on never happened."""


class Program(armillary.StandardTrainer, armillary.AbstractEvaluator):
    """A run with state of all kinds, which calls `at` at each point of it.

    A pass over its data has 15 steps.
    """

    def __init__(
        self,
        folder: Path,
        *,
        loop: int,
        eval_interval: int | None,
        checkpoint_interval: int | None,
        patience: int,
        place: str = "",
        at: Callable[[str], None] = lambda point: None,
    ) -> None:
        self.folder, self.at, self.eval_interval = folder, at, eval_interval
        source = from_arrays(
            {"x": np.arange(15.0, dtype=np.float32)},
            batch_size=1,
            shuffle_seed=0,
            repeat=eval_interval is not None,
        )
        dataset = armillary.get_strategy().distribute_dataset(source)
        super().__init__(dataset, armillary.StandardTrainerOptions(compile_step=False))
        self.step = armillary.create_global_step()
        self.total, self.rate = (nnx.Variable(jnp.float32(n)) for n in (0, 1))
        self.evaluated, self.counted = (nnx.Variable(jnp.int32(0)) for _ in range(2))
        self.best = NewBestMetric("loss", higher_is_better=False)
        self.stopping = EarlyStopping(
            lambda reason: self.controller.request_stop(reason),
            "loss",
            patience=patience,
            higher_is_better=False,
        )
        self.keep = armillary.CheckpointManager(
            armillary.Checkpoint(total=self.total), folder / "best", max_to_keep=1
        )
        manager = armillary.CheckpointManager(
            armillary.Checkpoint(
                **self.variables,
                best=self.best,
                stopping=self.stopping,
                dataset=dataset,
            ),
            folder / "run",
            max_to_keep=2,
            keep_best="loss",
            higher_is_better=False,
            checkpoint_interval=checkpoint_interval,
        )
        actions: dict[str, list[Any]] = {
            "train_actions": [lambda output: at("train action")],
            "eval_actions": [
                self.lower_rate,
                ConditionalAction(self.best.test, [self.save_best, self.best.commit]),
                PeriodicAction(self.count, interval=12),
                self.stopping,
                lambda output: at("last action"),
            ],
        }
        self.preemption = None
        if place:
            name, index = place.split(":")
            self.preemption = SaveCheckpointIfPreempted(manager)
            actions[name].insert(int(index), self.preemption)
        self.manager = manager
        self.controller = armillary.Controller(
            trainer=self,
            evaluator=self,
            global_step=self.step,
            steps_per_loop=loop,
            checkpoint_manager=manager,
            progress=False,
            **actions,
        )

    @property
    def variables(self) -> dict[str, nnx.Variable[Any]]:
        names = ("step", "total", "rate", "evaluated", "counted")
        return {name: getattr(self, name) for name in names}

    def train_loop_begin(self) -> None:
        self.at("loop")

    def train_step(self, iterator: Any) -> None:
        self.total[...] = (
            0.75 * self.total[...] + self.rate[...] * next(iterator)["x"][0]
        )
        self.step[...] += 1

    def evaluate(self, num_steps: int) -> dict[str, Any]:
        self.at("evaluation begins")
        self.evaluated[...] += 1
        self.at("evaluation ends")
        return {"loss": LOSSES[int(self.step[...]) // 5 - 1]}

    def lower_rate(self, output: Any) -> None:
        self.rate[...] *= 0.5
        self.at("rate is lowered")

    def save_best(self, output: Any) -> None:
        self.keep.save(int(self.step[...]))
        self.at("best is being saved")

    def count(self, output: Any) -> None:
        self.counted[...] += 1

    def run(self) -> "Program":
        interval, steps = self.eval_interval, STEPS
        try:
            if interval is None:
                self.controller.train_and_evaluate(epochs=3)
            else:
                self.controller.train_and_evaluate(steps, eval_interval=interval)
        finally:
            if self.preemption is not None:
                self.preemption.close()
            self.keep.sync()
        return self

    @property
    def outcome(self) -> dict[str, Any]:
        total = nnx.Variable(jnp.float32(0))
        (best_path,) = self.keep.checkpoints
        armillary.Checkpoint(total=total).read(best_path)
        evaluations = [
            (each["step"], each["values"])
            for each in read_metrics(self.folder / "run")
            if each["record"] == "eval"
        ]
        return {
            **{name: value[...].item() for name, value in self.variables.items()},
            "best": self.best.get_state(),
            "stopping": self.stopping.get_state(),
            "best model": (number(best_path), total[...].item()),
            "best checkpoint": number(str(self.manager.best_checkpoint)),
            "evaluations": evaluations,
        }

    @property
    def kept(self) -> list[int]:
        return [number(path) for path in self.manager.checkpoints]


def number(path: str) -> int:
    return int(Path(path).name.partition(".")[0].rpartition("_")[2])


class Interruption:
    """Interrupts a program at the point with an index; `kind` says in which way.

    "kill in save" takes the save that was begun last with it, "kill" does not.
    """

    def __init__(self, kind: str, index: int, folder: Path) -> None:
        self.kind, self.index, self.folder = kind, index, folder
        self.disk = folder.with_name("disk")
        self.points: list[str] = []

    def at(self, point: str) -> None:
        self.points.append(point)
        index = len(self.points) - 1
        if index > self.index:
            return
        if self.kind == "kill in save" and (point == "save begins" or not index):
            self._copy()
        if index < self.index:
            return
        if self.kind == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.kind == "Ctrl-C":
            raise KeyboardInterrupt
        elif self.kind == "error":
            raise RuntimeError(point)
        else:
            if self.kind == "kill":
                self._copy()
            raise KilledError

    def _copy(self) -> None:
        for thread in find_running():
            thread.join()
        shutil.rmtree(self.disk, ignore_errors=True)
        shutil.copytree(self.folder, self.disk)

    @contextlib.contextmanager
    def applied(self):
        start = Writer.start

        def start_at(writer: Writer, *args: Any) -> str | None:
            self.at("save begins")
            path = start(writer, *args)
            self.at("save has begun")
            return path

        expected = KilledError, KeyboardInterrupt, RuntimeError, SystemExit
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(*expected):
            patch.setattr(Writer, "start", start_at)
            yield
        if self.disk.exists():
            shutil.rmtree(self.folder)
            self.disk.rename(self.folder)


@functools.cache
def undisturbed(**options: Any) -> tuple[dict[str, Any], list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        Program(Path(folder), **options).run()
        program = Program(Path(folder), **options)
        return program.outcome, program.kept


def check(
    kind: str, index: int, place: str, options: dict[str, Any], *more: int
) -> bool:
    """Compares a run that is interrupted with one that is not."""
    if kind == "SIGTERM" and not place:
        place = "train_actions:1"
    expected, kept = undisturbed(**options)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        folder.mkdir()
        num_points = 0
        for at in (index, *more):
            interruption = Interruption(kind, at, folder)
            with interruption.applied():
                Program(folder, place=place, at=interruption.at, **options).run()
            num_points = num_points or len(interruption.points)
        Program(folder, place=place, **options).run()
        finished = Program(folder, place=place, **options)
        outcome = finished.outcome
        if kind == "SIGTERM":
            # Actions that are left on resume need the evaluation once more.
            assert 0 <= outcome["evaluated"] - expected["evaluated"] <= 1
            outcome["evaluated"] = expected["evaluated"]
        assert outcome == expected
        # A job that is preempted saves besides, and counts the interval from there.
        assert finished.kept == kept or kind == "SIGTERM"
        # The same command again trains nothing, does nothing twice, and saves nothing.
        paths = finished.manager.checkpoints
        finished.run()
        assert finished.manager.checkpoints == paths
        assert finished.outcome | {"evaluated": 0} == expected | {"evaluated": 0}
    return num_points > index


KINDS = ("error", "Ctrl-C", "SIGTERM", "kill", "kill in save")
PLACES = ("", "train_actions:0", *(f"eval_actions:{index}" for index in range(6)))
OPTIONS = st.fixed_dictionaries(
    {
        "loop": st.sampled_from([1, 5]),
        "eval_interval": st.sampled_from([None, 5, 10]),
        "checkpoint_interval": st.sampled_from([None, 5, 15]),
        "patience": st.sampled_from([1, 9]),
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])
@given(index=st.integers(0, 60), place=st.sampled_from(PLACES), options=OPTIONS)
def test_a_run_that_is_interrupted_ends_as_one_that_is_not(kind, index, place, options):
    while not check(kind, index, place, options):  # The run has fewer points.
        index //= 2


FIXED = {"loop": 5, "eval_interval": 5, "checkpoint_interval": 5, "patience": 9}


@slow_after_first("index", range(10))
def test_errors_at_any_points_of_evaluations_change_nothing(index):
    assert check("error", index, "", FIXED, 7 * index % 10)


def test_the_steps_before_a_failing_evaluation_are_not_lost(tmp_path):
    def fail(point):
        if point == "evaluation begins":
            raise RuntimeError(point)

    with pytest.raises(RuntimeError, match="evaluation begins"):
        Program(tmp_path, at=fail, **FIXED).run()

    again = Program(tmp_path, **FIXED)
    assert again.step[...] == 5
    assert again.best.best_value is None


@pytest.mark.slow
def test_a_run_that_was_stopped_early_stays_stopped(tmp_path):
    for patience, step in ((1, 15), (1, 15), (9, 40)):
        program = Program(tmp_path, **{**FIXED, "patience": patience}).run()
        assert program.step[...] == step
        # The best value is in the checkpoint of its step.
        assert Program(tmp_path, **FIXED).best.best_value == min(LOSSES[: step // 5])


def test_a_run_that_was_stopped_early_does_not_log_that_it_trains(tmp_path, caplog):
    caplog.set_level("INFO", "armillary")
    Program(tmp_path, **{**FIXED, "patience": 1}).run()
    assert "training until step" in caplog.text
    caplog.clear()
    Program(tmp_path, **{**FIXED, "patience": 1}).run()
    lines = [record.getMessage() for record in caplog.records]
    assert "restored from checkpoint" in caplog.text
    assert not any("training until" in line for line in lines)
    assert lines[-1].startswith("stopped at step 15: ")


def test_an_early_stopping_that_no_action_calls_is_reported(tmp_path, caplog):
    step = armillary.create_global_step()
    stop = EarlyStopping(print, "loss", patience=1, higher_is_better=False)

    def make(*eval_actions):
        caplog.clear()
        armillary.Controller(
            evaluator=Program.__new__(Program),
            trainer=Program.__new__(Program),
            global_step=step,
            steps_per_loop=1,
            eval_actions=eval_actions,
            checkpoint_manager=armillary.CheckpointManager(
                armillary.Checkpoint(step=step, stop=stop), tmp_path
            ),
        )
        return caplog.text

    assert "`EarlyStopping` as `stop`" in make()
    assert "`eval_actions=[stop]`" in make()
    assert not make(stop)
    # The function may call it.
    assert not make(lambda output: stop(output))


def test_actions_that_forget_are_reported(tmp_path, caplog):
    step = armillary.create_global_step()
    best = NewBestMetric("loss", higher_is_better=False)
    for objects, num_warnings in (({"best": best}, 0), ({}, 1)):
        armillary.Controller(
            evaluator=Program.__new__(Program),
            trainer=Program.__new__(Program),
            global_step=step,
            steps_per_loop=1,
            eval_actions=[ConditionalAction(best.test, [best.commit])],
            checkpoint_manager=armillary.CheckpointManager(
                armillary.Checkpoint(step=step, **objects), tmp_path
            ),
        )
        assert len(caplog.records) == num_warnings
    assert "`NewBestMetric` is not in the `Checkpoint`" in caplog.text
