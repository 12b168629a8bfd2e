"""Tests of the best checkpoint: its choice, its protection, and its file."""

import contextlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import armillary
from armillary.checkpoint import Checkpoint, CheckpointManager, _folder, _writer
from armillary.errors import CheckpointError
from armillary.report import _page
from armillary.report._run_files import read_run
from tests.command import run_command
from tests.controller.loops import Loops
from tests.mistakes import mistakes

STEPS = 6


class Program:
    """A loop without a controller, which evaluates some steps, and saves some."""

    def __init__(self, folder, plan, max_to_keep):
        self.step, self.evaluated, self.array = 0, 0, jnp.zeros(2)
        self.plan = plan
        self.manager = CheckpointManager(
            Checkpoint(program=self),
            folder,
            max_to_keep=max_to_keep,
            step_counter=lambda: self.step,
            keep_best="of/value",
            higher_is_better=True,
        )

    def get_state(self):
        return {"step": self.step, "evaluated": self.evaluated}

    def set_state(self, state):
        self.step, self.evaluated = state["step"], state["evaluated"]

    def run(self, is_killed=lambda: False):
        self.manager.restore_or_initialize()
        while self.step < len(self.plan) or self.is_due:
            if not self.is_due:
                self.step += 1
                self.array = jnp.full(2, self.step, "float32")
                if self.plan[self.step - 1]["saves"] == "before":
                    self.manager.save()
            step = self.plan[self.step - 1]
            if self.is_due:
                self.evaluated = self.step
                if self.manager.note_evaluation({"of": {"value": step["value"]}}):
                    self.manager.save()
            if step["saves"] == "after" and not self.manager.has_saved_step():
                self.manager.save()
            if step["waits"]:
                self.manager.sync()
            if is_killed():
                break
        self.manager.close()
        return self

    @property
    def is_due(self):
        is_planned = self.step and self.plan[self.step - 1]["value"] is not None
        return bool(is_planned and self.evaluated < self.step)


def expect(plan, max_to_keep):
    """Returns the best step, and what is kept, by the rule in plain words."""
    best, saved = None, []
    for step, each in enumerate(plan, start=1):
        value = each["value"]
        is_new = value is not None and not math.isnan(value)
        is_new = is_new and (best is None or value > plan[best - 1]["value"])
        best = step if is_new else best
        if is_new or each["saves"]:
            saved.append(step)
    return best, sorted({*saved[-max_to_keep:], *([best] if best else [])})


def look(folder):
    """Returns the best step and all others that are there, each as it was saved."""
    program = Program(folder, [], None)
    best = program.manager.best_checkpoint
    found = {}
    for path in program.manager.checkpoints:
        program.manager.restore(path)
        assert (program.array == program.step).all()
        found[path] = program.step
    return found.get(best), sorted(found.values())


@contextlib.contextmanager
def killed_at(index, folder, disk):
    """Keeps what is on the disk at one of the points of saves, marks and removals."""
    points = []

    def at(point):
        points.append(point)
        if len(points) == index:
            shutil.copytree(folder, disk, ignore=shutil.ignore_patterns("*-tmp*"))

    def wrap(function):
        def call(*args, **kwargs):
            at(f"{function} begins")
            result = function(*args, **kwargs)
            at(f"{function} ends")
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (_writer, "write_best"),
            (_writer, "sync_name"),
            (_folder, "remove"),
            (_writer, "write_folder"),
        ):
            patch.setattr(owner, name, wrap(getattr(owner, name)))
        yield lambda: len(points) >= index


VALUES = st.sampled_from([None, 0.0, 1.0, 2.0, math.nan])
PLANS = st.lists(
    st.fixed_dictionaries(
        {
            "value": VALUES,
            "saves": st.sampled_from(["", "before", "after"]),
            "waits": st.booleans(),
        }
    ),
    min_size=STEPS,
    max_size=STEPS,
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(PLANS, st.lists(st.integers(1, 30), max_size=3), st.integers(1, 2))
def test_the_best_is_kept_exactly_whatever_ends_a_run(plan, kills, kept):
    with tempfile.TemporaryDirectory() as parent:
        folder, disk = Path(parent, "run"), Path(parent, "disk")
        folder.mkdir()
        for index in kills:
            with killed_at(index, folder, disk) as is_killed:
                Program(folder, plan, kept).run(is_killed)
            if disk.exists():
                shutil.rmtree(folder)
                disk.rename(folder)
                look(folder)
        # One more save removes what a kill has left.
        plan = [*plan, {"value": None, "saves": "after", "waits": True}]
        Program(folder, plan, kept).run()
        best, steps = expect(plan, kept)
        assert look(folder) == (best, steps)
        assert read_best_step(folder) == best
        # Started again, it has nothing to do.
        names = sorted(os.listdir(folder))
        Program(folder, plan, kept).run()
        assert sorted(os.listdir(folder)) == names


def read_best_step(folder):
    best = CheckpointManager(Checkpoint(loops=Loops()), folder).best_checkpoint
    return best and int(Path(best).name.rpartition("_")[2])


def make(directory, values, evaluator=None, trains=True, **options):
    """Returns a controller whose evaluation at a step gives one of the values."""
    loops = Loops(evaluated=lambda step: {"accuracy": values[step]})
    options = {"keep_best": "accuracy", "higher_is_better": True, **options}
    manager = CheckpointManager(Checkpoint(loops=loops), directory, **options)
    return armillary.Controller(
        trainer=loops if trains else None,
        evaluator=evaluator or loops,
        global_step=lambda: loops.step,
        steps_per_loop=10,
        checkpoint_manager=manager,
    )


def names_in(directory):
    return sorted(path.name for path in Path(directory).glob("checkpoint_*"))


def test_a_controller_saves_a_new_best_and_restores_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    values = {10: 0.5, 20: 0.75, 30: 0.75, 40: math.nan, 50: 0.25}
    controller = make(tmp_path / "run", values, max_to_keep=1)
    manager = controller.checkpoint_manager
    assert manager.best_checkpoint is None
    reason = (
        r"no checkpoint is known as the best\. `keep_best='accuracy'` needs an eval"
    )
    with pytest.raises(CheckpointError, match=reason):
        manager.restore_best()
    controller.train_and_evaluate(50, eval_interval=10)
    manager.sync()

    assert names_in(manager.directory) == ["checkpoint_20", "checkpoint_50"]
    again = make(tmp_path / "run", values, max_to_keep=1)
    assert again.trainer.step == 50
    assert again.checkpoint_manager.restore_best() == manager.best_checkpoint
    assert again.trainer.step == 20
    # A manager that does not know of it neither loses nor misses it.
    plain = make(tmp_path / "run", values, keep_best=None, higher_is_better=None)
    assert plain.train(60) and plain.checkpoint_manager.best_checkpoint
    assert plain.checkpoint_manager.restore_best() == manager.best_checkpoint

    best = "best accuracy 0.75 (checkpoint_20)"
    for words in (
        ["checkpoint", "show", manager.directory],
        ["checkpoint", "show", manager.best_checkpoint],
        ["runs", str(tmp_path)],
    ):
        assert run_command(words) == 0
        assert best in capsys.readouterr().out
    assert run_command(["checkpoint", "show", f"{tmp_path}/run/checkpoint_60"]) == 0
    assert "best" not in capsys.readouterr().out
    assert run_command(["runs", str(tmp_path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["best"]["checkpoint"], run["best"]["value"]) == (
        manager.best_checkpoint,
        0.75,
    )
    pytest.importorskip("plotly")
    assert best in _page._checkpoints(read_run(tmp_path / "run"))


def test_a_best_checkpoint_that_is_saved_again_at_the_end_is_still_the_best(tmp_path):
    controller = make(tmp_path, {10: 0.5})
    # State that an action changes is saved once more.
    controller.eval_actions = (lambda output: setattr(loops, "array", jnp.ones(1)),)
    loops = controller.trainer
    loops.array = jnp.zeros(1)
    controller.train_and_evaluate(10)
    controller.checkpoint_manager.sync()
    assert names_in(tmp_path) == ["checkpoint_10.1"]
    assert controller.checkpoint_manager.best_checkpoint.endswith("checkpoint_10.1")


@pytest.mark.parametrize("by_manager", [False, True])
def test_a_checkpoint_that_is_evaluated_later_can_be_the_best(tmp_path, by_manager):
    values = {10: 0.5, 20: 0.75, 30: 0.25}
    controller = make(tmp_path, values, checkpoint_interval=10)
    controller.train(30)
    manager = controller.checkpoint_manager
    if by_manager:  # a program that only evaluates
        controller = make(tmp_path, values, trains=False)
        manager = controller.checkpoint_manager
    restore = manager.restore if by_manager else controller.restore_checkpoint
    for path in manager.checkpoints:
        restore(path)
        controller.evaluate()
    assert manager.best_checkpoint == str(tmp_path / "checkpoint_20")
    assert names_in(tmp_path) == [f"checkpoint_{step}" for step in (10, 20, 30)]


def test_an_evaluator_elsewhere_decides_what_the_training_job_keeps(tmp_path, caplog):
    values = {10: 0.5, 20: 0.25, 30: 0.75, 40: 0.5, 50: 0.5}
    options = {"max_to_keep": 1, "checkpoint_interval": 10}
    trains = make(tmp_path, values, **options)
    evaluates = make(tmp_path, values, **options)
    for step in values:
        trains.train(step)
        trains.checkpoint_manager.sync()
        before = names_in(tmp_path)
        evaluates.evaluate_continuously(timeout=0, until_step=step)
        assert names_in(tmp_path) == before  # It writes and removes none.
    assert names_in(tmp_path) == ["checkpoint_30", "checkpoint_50"]

    # One that goes while it is evaluated is not the best.
    values[60] = 1.0
    trains.train(60)
    trains.checkpoint_manager.sync()

    def evaluated(step):
        if step == 60:
            shutil.rmtree(tmp_path / "checkpoint_60")
        return {"accuracy": values[step]}

    evaluates.trainer.evaluated = evaluated
    evaluates.evaluate_continuously(timeout=0, until_step=60)
    assert "`max_to_keep`" in caplog.text
    assert evaluates.checkpoint_manager.best_checkpoint.endswith("checkpoint_30")


def test_the_name_says_which_of_several_evaluators(tmp_path):
    values = {10: 0.5}
    one = Loops()
    two = {"validation": one, "test": one}
    named = make(tmp_path / "a", values, two, keep_best="validation/accuracy")
    one.step = 10
    named.train_and_evaluate(10)
    assert named.checkpoint_manager.best_checkpoint == f"{tmp_path}/a/checkpoint_10"
    unknown = make(tmp_path / "b", values, two)
    there = "`validation/accuracy`, `test/accuracy`"
    with pytest.raises(ValueError, match=f"'accuracy', which .* numbers \\({there}"):
        unknown.train_and_evaluate(10)


@mistakes(
    {
        ValueError: {
            "`higher_is_better` is None, but": lambda at: make(
                at, {}, higher_is_better=None
            ),
            "`keep_best` is None and": lambda at: make(at, {}, keep_best=None),
            "`keep_best` is 1 and": lambda at: make(at, {}, keep_best=1),
            "they were 'accuracy' and True. Use these": lambda at: make(
                at, {}, higher_is_better=False
            ),
            "is damaged .* Delete the file": lambda at: (
                (at / "BEST").write_text("{}["),
                make(at, {}),
            ),
        }
    }
)
def test_mistakes_are_explained(call, error, message, tmp_path):
    controller = make(tmp_path, {10: 0.5})
    controller.train_and_evaluate(10)
    controller.checkpoint_manager.sync()
    with pytest.raises(error, match=message):
        call(tmp_path)
