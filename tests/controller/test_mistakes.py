"""Tests of warnings about programs that run, but compute something else."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.errors import CheckpointError
from tests.problems import make_strategy

DATA = {"x": np.ones((8, 2), np.float32)}


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy, factor=1.0, output=None):
        data = armillary.data.from_arrays(DATA, batch_size=4, repeat=True)
        super().__init__(data)
        self.strategy, self.factor, self.output = strategy, factor, output
        self.model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)

    def train_step(self, iterator):
        self.strategy.run(self.replica_step, args=(next(iterator),))

    def replica_step(self, batch):
        gradients = nnx.grad(lambda model: model(batch["x"]).mean())(self.model)
        gradients = armillary.all_reduce("mean", gradients)
        gradients = jax.tree.map(lambda each: each * self.factor, gradients)
        self.optimizer.update(self.model, gradients)

    def train_loop_end(self):
        return self.output


class Silent(armillary.StandardEvaluator):
    def __init__(self, model):
        super().__init__(armillary.data.from_arrays(DATA, batch_size=4))
        self.model = model
        self.loss = nnx.metrics.Average()

    def eval_step(self, iterator):
        armillary.get_strategy().run(self.replica_step, args=(next(iterator),))

    def replica_step(self, batch):
        self.loss.update(values=self.model(batch["x"]))


class Evaluator(Silent):
    def eval_end(self, *state):
        return {"loss": self.loss.compute()}


def make(trainer, **options):
    return armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        steps_per_loop=2,
        strategy=trainer.strategy,
        **options,
    )


def warnings(caplog):
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("factor", [np.inf, np.nan])
def test_weights_that_are_not_finite_are_reported_where_no_output_shows_them(
    factor, num_replicas, caplog
):
    controller = make(Trainer(make_strategy(num_replicas), factor))

    controller.train(4)

    (message,) = warnings(caplog)
    assert message.startswith("At step 4, 2 arrays of the trainer have values")
    assert "  model/kernel\n" in message
    assert 'on_non_finite="raise"' in message
    controller.train(4)  # There is nothing left to do.
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(
    ("factor", "output"),
    [(1.0, None), (np.nan, {"loss": 1.0})],
    ids=["finite", "shown"],
)
def test_finite_weights_and_weights_with_an_output_get_no_warning(
    factor, output, caplog
):
    make(Trainer(make_strategy(1), factor, output)).train(4)
    assert not warnings(caplog)


def test_large_arrays_are_not_looked_at_when_small_ones_tell(caplog, monkeypatch):
    monkeypatch.setattr(armillary.controller._warnings, "_MAX_BYTES", 4)
    trainer = Trainer(make_strategy(1), np.nan)
    make(trainer).train(2)
    (message,) = warnings(caplog)
    assert "1 array of the trainer has values" in message
    assert "model/bias" in message


def test_an_evaluator_without_an_end_is_reported(caplog):
    trainer = Trainer(make_strategy(1))
    controller = make(trainer, evaluator={"a": Silent(trainer.model)})

    controller.evaluate()
    controller.evaluate()

    (message,) = warnings(caplog)
    assert message.startswith("`Silent` has no `eval_end`")


def test_an_evaluator_of_a_copy_is_reported(caplog):
    trainer = Trainer(make_strategy(1))
    controller = make(trainer, evaluator=Evaluator(nnx.clone(trainer.model)))

    output = controller.train_and_evaluate(4)

    assert output["loss"] != trainer.model(jnp.ones((1, 2)))
    (message,) = warnings(caplog)
    assert message.startswith("`Evaluator` evaluates parameters that `Trainer` does")
    assert "  model/kernel\n" in message


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        nnx.view,
        lambda model: nnx.List([model, nnx.Linear(2, 1, rngs=nnx.Rngs(1))])[0],
    ],
    ids=["itself", "view", "in a list"],
)
def test_an_evaluator_of_the_model_is_not(wrap, caplog):
    trainer = Trainer(make_strategy(1))
    make(trainer, evaluator=Evaluator(wrap(trainer.model))).train_and_evaluate(4)
    assert not warnings(caplog)


@pytest.mark.parametrize("has_own", [False, True])
def test_a_curve_of_training_and_evaluation_is_reported_once(has_own, tmp_path, caplog):
    trainer = Trainer(make_strategy(1), output={"loss": 1.0})
    controller = make(
        trainer,
        evaluator=Evaluator(trainer.model),
        summary_dir=tmp_path / "train",
        eval_summary_dir=tmp_path / "eval" if has_own else None,
    )

    controller.train_and_evaluate(8, eval_interval=2)

    if has_own:
        assert not warnings(caplog)
        return
    (message,) = warnings(caplog)
    assert f"both write `loss` to `{tmp_path / 'train'}`" in message
    assert "eval_summary_dir=" in message


def save_into(directory, trainer):
    checkpoint = armillary.Checkpoint(trainer=trainer)
    manager = armillary.CheckpointManager(checkpoint, directory, checkpoint_interval=2)
    return make(trainer, checkpoint_manager=manager)


@pytest.mark.parametrize("is_gone", [False, True])
def test_two_trainers_of_one_directory_are_an_error(tmp_path, is_gone):
    strategy = make_strategy(1)
    first = save_into(tmp_path, Trainer(strategy))
    second = save_into(tmp_path, Trainer(strategy))
    first.train(4)
    if is_gone:
        del first
        gc.collect()

    with pytest.raises(CheckpointError, match="another trainer of this program has"):
        second.train(4)

    second.restore_checkpoint()
    second.train(6)
    assert int(second.trainer.optimizer.step[...]) == 6


def test_trainers_one_after_the_other_are_none(tmp_path):
    """As in a notebook, in which a cell is run again."""
    for steps in (4, 6, 8):
        trainer = Trainer(make_strategy(1))
        controller = save_into(tmp_path, trainer)
        controller.train(steps)
        make(trainer).train(steps)
        again = save_into(tmp_path, trainer)
        again.train(steps)
        controller.train(steps)
    assert int(trainer.optimizer.step[...]) == 8


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_pass_over_a_dataset_is_no_dataset(num_replicas):
    strategy = make_strategy(num_replicas)
    dataset = strategy.distribute_dataset(
        armillary.data.from_arrays(DATA, batch_size=4)
    )
    with pytest.raises(TypeError, match="`train_dataset` is an iterator over a distr"):
        armillary.StandardTrainer.__init__(object.__new__(Trainer), iter(dataset))
    with pytest.raises(TypeError, match=r"Write `dataset` instead of `iter\(dataset"):
        next(armillary.predict(lambda batch: batch["x"], iter(dataset)))


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    controller = save_into(tmp_path / "file", Trainer(make_strategy(1)))
    with pytest.raises(CheckpointError, match=r"file` cannot be written \(File exists"):
        controller.train(2)
