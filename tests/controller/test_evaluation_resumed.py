"""A run that fails anywhere around an evaluation ends as one that does not."""

import itertools
from pathlib import Path

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import armillary
from armillary.actions import ConditionalAction, EarlyStopping, NewBestMetric

INTERVAL = 2


class FailedError(Exception):
    """What fails here."""


class Run:
    """One attempt of a run: its objects are made anew, its directory stays.

    The evaluation of step 2n has the n-th loss. The attempt fails at call `fails_at` of
    what may fail: evaluations and actions.
    """

    def __init__(self, directory: Path, losses, *, patience=100, fails_at=None):
        self.directory, self.losses = directory, losses
        self.calls, self.fails_at = itertools.count(), fails_at
        self.trainer = Trainer()
        self.best = NewBestMetric("loss", higher_is_better=False)
        self.stopping = EarlyStopping(
            lambda reason: self.controller.request_stop(reason),
            "loss",
            patience=patience,
            higher_is_better=False,
        )
        self.keep = armillary.CheckpointManager(
            armillary.Checkpoint(trainer=self.trainer),
            directory / "best",
            max_to_keep=1,
        )
        manager = armillary.CheckpointManager(
            armillary.Checkpoint(
                trainer=self.trainer, best=self.best, stopping=self.stopping
            ),
            directory / "checkpoints",
            max_to_keep=2,
            checkpoint_interval=INTERVAL,
        )
        self.controller = armillary.Controller(
            trainer=self.trainer,
            evaluator=Evaluator(self),
            global_step=self.trainer.step,
            steps_per_loop=INTERVAL,
            checkpoint_manager=manager,
            eval_actions=[
                self.may_fail,
                ConditionalAction(
                    self.best.test,
                    [self.may_fail, self.save_best, self.may_fail, self.best.commit],
                ),
                self.may_fail,
                self.stopping,
                self.lower_rate,
                self.may_fail,
            ],
            progress=False,
        )

    def may_fail(self, output=None):
        if next(self.calls) == self.fails_at:
            raise FailedError

    def save_best(self, output):
        self.keep.save(int(self.trainer.step[...]))

    def lower_rate(self, output):
        self.trainer.rate = self.trainer.rate * 0.5

    def train(self):
        self.controller.train_and_evaluate(
            train_steps=INTERVAL * len(self.losses), eval_interval=INTERVAL
        )
        self.keep.sync()

    @property
    def outcome(self):
        return (
            int(self.trainer.step[...]),
            float(self.trainer.total),
            float(self.trainer.rate),
            self.best.best_value,
            self.stopping.best_value,
            self.stopping.num_without_improvement,
            self.names("best"),
            self.names("checkpoints"),
        )

    def names(self, folder):
        """The numbers of the checkpoints, whether or not they were saved again."""
        folders = (self.directory / folder).iterdir()
        return sorted(path.name.partition(".")[0] for path in folders)


class Trainer(armillary.AbstractTrainer):
    def __init__(self):
        self.step, self.total = armillary.create_global_step(), jnp.zeros(())
        self.rate = jnp.ones(())

    def train(self, num_steps):
        for _ in range(num_steps):
            self.total = self.total * 0.75 + self.rate
        self.step[...] += num_steps


class Evaluator(armillary.AbstractEvaluator):
    def __init__(self, run):
        self.run = run

    def evaluate(self, num_steps):
        self.run.may_fail()
        index = int(self.run.trainer.step[...]) // INTERVAL - 1
        return {"loss": self.run.losses[index]}


def train_through(directory, losses, failures, **options):
    """Trains with attempts that fail, and one that does not; returns its outcome."""
    for fails_at in (*failures, None):
        run = Run(directory, losses, fails_at=fails_at, **options)
        try:
            run.train()
        except FailedError:
            run.keep.sync()
            continue
        if fails_at is None:
            return run.outcome
    return Run(directory, losses, **options).outcome


LOSSES = [1.0, 0.2, 0.5]
NUM_CALLS = 17


def test_the_points_are_all_there_are(tmp_path):
    run = Run(tmp_path, LOSSES)
    run.train()
    assert next(run.calls) == NUM_CALLS - 1


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    outcome = train_through(tmp_path_factory.mktemp("undisturbed"), LOSSES, [])
    assert outcome[3] == 0.2
    assert outcome[6] == ["checkpoint_4"]
    return outcome


@pytest.mark.parametrize("fails_at", range(NUM_CALLS))
def test_a_run_that_fails_anywhere_in_an_evaluation_ends_the_same(
    fails_at, expected, tmp_path
):
    assert train_through(tmp_path, LOSSES, [fails_at]) == expected


@pytest.mark.slow
@given(
    losses=st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4]), min_size=2, max_size=4),
    failures=st.lists(st.integers(0, 12), max_size=3),
    patience=st.integers(1, 3),
)
@settings(max_examples=6, deadline=None)
def test_whatever_the_losses_and_however_often(
    losses, failures, patience, tmp_path_factory
):
    paths = [tmp_path_factory.mktemp(name) for name in "ab"]
    expected = train_through(paths[0], losses, [], patience=patience)
    found = train_through(paths[1], losses, failures, patience=patience)
    assert found == expected


def test_the_steps_before_a_failing_evaluation_are_not_lost(tmp_path):
    run = Run(tmp_path, LOSSES, fails_at=0)
    with pytest.raises(FailedError):
        run.train()

    again = Run(tmp_path, LOSSES)
    assert again.trainer.step[...] == INTERVAL
    assert again.best.best_value is None


def test_a_best_value_is_in_the_checkpoint_of_its_step(tmp_path):
    Run(tmp_path, LOSSES[:2]).train()

    again = Run(tmp_path, LOSSES)
    assert again.best.best_value == 0.2
    again.train()
    assert again.best.best_value == 0.2
    assert again.outcome[6] == ["checkpoint_4"]


def test_a_run_that_was_stopped_early_stays_stopped(tmp_path):
    losses = [1.0] * 9
    for _ in range(3):
        run = Run(tmp_path, losses, patience=2)
        run.train()
        assert run.trainer.step[...] == 3 * INTERVAL

    run = Run(tmp_path, losses, patience=4)
    run.train()
    assert run.trainer.step[...] == 5 * INTERVAL


def test_actions_that_forget_are_told(tmp_path, caplog):
    trainer = Trainer()
    best = NewBestMetric("loss", higher_is_better=False)

    def make(**objects):
        armillary.Controller(
            trainer=trainer,
            global_step=trainer.step,
            steps_per_loop=1,
            eval_actions=[ConditionalAction(best.test, [best.commit])],
            checkpoint_manager=armillary.CheckpointManager(
                armillary.Checkpoint(trainer=trainer, **objects), tmp_path
            ),
        )

    make(best=best)
    assert not caplog.records
    make()
    (record,) = caplog.records
    assert "`NewBestMetric` is not in the `Checkpoint`" in record.getMessage()
