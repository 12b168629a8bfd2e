"""Tests of a job that evaluates the checkpoints of another, and of runs that resume."""

import json
import shutil

import jax.numpy as jnp
import pytest

import armillary
from armillary import Controller
from armillary.checkpoint import Checkpoint, CheckpointManager
from armillary.controller import _directory
from armillary.errors import CheckpointDamageError, CheckpointMismatchError
from tests.controller.checkpoint_runs import Run, make_controller, saved_steps


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


def test_a_base_that_is_left_out_is_verified_at_each_evaluation(tmp_path):
    objects = {"base": {"weight": jnp.arange(3.0)}, "leave_out": "base"}
    make_controller(Run(), tmp_path, objects=objects).train(8)

    def evaluate(weight):
        run = Run()
        checkpoint = Checkpoint(step=run.step, total=run.total, base={"weight": weight})
        manager = CheckpointManager(checkpoint, tmp_path)
        job = Controller(
            evaluator=run, global_step=run.step, checkpoint_manager=manager
        )
        job.evaluate_continuously(timeout=0)
        return run.evaluated

    assert evaluate(jnp.arange(3.0)) == [2, 6, 8]
    with pytest.raises(CheckpointMismatchError, match="base/weight"):
        evaluate(jnp.ones(3))


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


def test_a_run_that_goes_back_runs_its_actions_after_evaluations_again(tmp_path):
    steps, run = [], Run()
    note = armillary.actions.PeriodicAction(
        lambda _: steps.append(int(run.step.get_value())), 4
    )
    options = {"checkpoint_interval": 2}
    controller = make_controller(run, tmp_path, options, eval_actions=[note])
    controller.train_and_evaluate(train_steps=8, eval_interval=4)
    controller.restore_checkpoint(tmp_path / "checkpoint_2")
    controller.train_and_evaluate(train_steps=8, eval_interval=4)
    assert steps == [4, 8, 4, 8]


@pytest.mark.parametrize("evaluates", [False, True])
def test_an_evaluation_job_keeps_the_interval_of_its_actions(tmp_path, evaluates):
    options = {"checkpoint_interval": 2, "max_to_keep": None}
    training = make_controller(Run(), tmp_path, options)
    if evaluates:  # The latest checkpoint records the evaluation of step 8.
        training.train_and_evaluate(train_steps=10, eval_interval=2)
        shutil.rmtree(tmp_path / "checkpoint_2")
    else:
        training.train(10)
    steps, run = [], Run()
    note = armillary.actions.PeriodicAction(
        lambda _: steps.append(int(run.step.get_value())), 4
    )

    # One script for all roles, so this controller also has the trainer.
    evaluation = make_controller(run, tmp_path, options, eval_actions=[note])
    evaluation.evaluate_continuously(timeout=0)

    assert steps == [4, 8]


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
