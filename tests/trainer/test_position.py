"""Tests that `Checkpoint(trainer=trainer)` saves the position in the data."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.checkpoint import _checkpoint
from armillary.data import from_arrays
from armillary.errors import DatasetStateError
from tests.tiers import slow_after_first

X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
DATA = {"x": X, "y": X @ np.array([1.0, -2.0, 3.0], "float32")}


class Trainer(armillary.StandardTrainer):
    """A trainer with data that is not distributed, and the controller's strategy."""

    def __init__(self, data):
        super().__init__(data)
        self.model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.05), wrt=nnx.Param)

    def train_step(self, iterator):
        def loss_fn(model, batch):
            return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)

        def step_fn(batch):
            gradients = nnx.grad(loss_fn)(self.model, batch)
            gradients = armillary.all_reduce("mean", gradients)
            self.optimizer.update(self.model, gradients)

        strategy = armillary.get_strategy()
        strategy.run(step_fn, args=(jax.tree.leaves(iterator)[0].__next__(),))
        for each in jax.tree.leaves(iterator)[1:]:
            next(each)


def make_data(batch_size=8, seed=3):
    return from_arrays(DATA, batch_size=batch_size, shuffle_seed=seed, repeat=True)


def run(directory, *stops, data=make_data, num_replicas=2):
    """Trains to each stop in a program of its own; returns the kernel."""
    kernel = None
    for stop in stops:
        trainer = Trainer(data())
        checkpoint = armillary.Checkpoint(trainer=trainer)
        armillary.Controller(
            trainer=trainer,
            global_step=trainer.optimizer.step,
            strategy=armillary.MirroredStrategy(jax.devices()[:num_replicas]),
            steps_per_loop=2,
            checkpoint_manager=armillary.CheckpointManager(checkpoint, directory),
        ).train(stop)
        kernel = np.asarray(trainer.model.kernel[...])
    return kernel


@slow_after_first(
    "data", [make_data, lambda: [make_data(), make_data(4)]], ids=["one", "two"]
)
def test_a_run_that_is_stopped_continues_bit_for_bit(data, tmp_path, caplog):
    whole = run(tmp_path / "whole", 13, data=data)
    stopped = run(tmp_path / "stopped", 3, 5, 13, data=data)
    np.testing.assert_array_equal(stopped, whole)
    assert "position of the training data" not in caplog.text


def test_a_checkpoint_without_a_position_is_restored_with_a_warning(
    tmp_path, monkeypatch, caplog
):
    with monkeypatch.context() as patch:
        # As releases wrote it in which trainers had no state.
        patch.setattr(_checkpoint, "has_position", lambda value: False)
        kernel = run(tmp_path, 3)
    trainer = Trainer(make_data())
    checkpoint = armillary.Checkpoint(trainer=trainer)
    armillary.CheckpointManager(checkpoint, tmp_path).restore_or_initialize()
    np.testing.assert_array_equal(trainer.model.kernel[...], kernel)
    kept = "1 of the program, left as they were:\n  trainer (the position in its data)"
    assert kept in caplog.text


def make_half():
    return make_data(batch_size=4)


def test_a_resumed_run_with_another_batch_size_says_so(tmp_path, caplog):
    line = "the batch was 8 at the save and is 4 now"
    with caplog.at_level("INFO", logger="armillary"):
        run(tmp_path, 3, 4)
        assert "the batch was" not in caplog.text
        run(tmp_path, 5, data=make_half)
        assert caplog.text.count(line) == 1


def test_a_position_moves_with_the_strategy():
    trainer, whole = Trainer(make_data()), Trainer(make_data())
    whole.train(3)
    trainer.set_state(json.loads(json.dumps(whole.get_state())))
    with armillary.MirroredStrategy().scope():
        assert trainer.get_state() == whole.get_state()
        trainer.train(2)
    whole.train(2)
    assert trainer.get_state() == whole.get_state()


def test_a_state_of_other_data_is_refused():
    trainer = Trainer(make_data())
    with pytest.raises(DatasetStateError, match="`state` holds the positions of 2 "):
        trainer.set_state([None, None])
    other = Trainer(make_data(seed=4))
    other.train(1)
    with pytest.raises(DatasetStateError, match="seed"):
        trainer.set_state(other.get_state())


def test_data_without_a_position_has_none():
    trainer = Trainer({"x": X[:4], "y": DATA["y"][:4]} for _ in range(3))
    trainer.train(1)
    assert trainer.get_state() == [None]
    trainer.set_state([None])
    trainer.train(1)
    assert int(trainer.optimizer.step[...]) == 2


class Evaluator(armillary.StandardEvaluator):
    def __init__(self, data):
        super().__init__(data)
        self.sum = nnx.metrics.Average()

    def eval_begin(self):
        self.sum.reset()

    def eval_step(self, iterator):
        self.sum.update(values=next(iterator)["y"])

    def eval_end(self, *_):
        return {"count": self.sum.count[...], "mean": self.sum.compute()}


@pytest.mark.parametrize("cuts", [False, True])
def test_an_evaluation_begins_at_the_first_pass_and_moves_no_position(cuts):
    data = from_arrays(DATA, batch_size=8, shuffle_seed=3)
    data = armillary.get_strategy().distribute_dataset(data)
    trainer, evaluator = Trainer(data), Evaluator(data)
    trainer.train(3)
    before = data.get_state()
    first = evaluator.evaluate(3 if cuts else -1)
    assert (data.get_state(), first["count"]) == (before, 24 if cuts else 64)
    # Also where a position within a pass was restored.
    data.set_state(before)
    assert evaluator.evaluate(3 if cuts else -1) == first
    trainer.train(2)
    assert data.get_state()["source"]["index"] == 40


def test_a_look_at_the_data_of_a_trainer_moves_no_position():
    data = armillary.get_strategy().distribute_dataset(make_data())
    trainer = Trainer(data)
    for _ in range(3):
        trainer.train(1)
        next(iter(data))
    assert data.get_state()["source"] == {"epoch": 0, "index": 24, "num_examples": 64}


def test_a_trainer_that_comes_back_to_its_data_continues_in_it():
    strategy = armillary.get_strategy()
    data = [strategy.distribute_dataset(make_data()) for _ in range(2)]
    trainer = Trainer(data[0])
    for number in (0, 1, 0, 0):
        trainer.train_dataset = data[number]
        trainer.train(2)
    assert [each.get_state()["source"]["index"] for each in data] == [48, 16]


def test_a_dataset_that_is_replaced_in_a_nest_is_read():
    def make(start):
        x = np.arange(start, start + 8, dtype=np.float32)
        return from_arrays({"x": x}, batch_size=1)

    class Adds(armillary.StandardTrainer):
        def __init__(self, data):
            super().__init__(data)
            self.total = jnp.zeros(())

        def train_step(self, iterator):
            real = next(iterator["real"])["x"].sum()
            self.total = self.total + real + next(iterator["noise"])["x"].sum()

    trainer = Adds({"real": make(1), "noise": make(10)})
    trainer.train(1)
    assert trainer.total == 11

    trainer.train_dataset["noise"] = make(100)
    trainer.train(1)

    # The other dataset continues.
    assert trainer.total == 11 + 2 + 100
    indices = [state["source"]["index"] for state in trainer.get_state()]
    assert dict(zip(sorted(trainer.train_dataset), indices, strict=True)) == {
        "noise": 1,
        "real": 2,
    }


def test_two_trainers_on_one_distributed_dataset_are_an_error(caplog):
    data = armillary.get_strategy().distribute_dataset(make_data())
    trainers = [Trainer(data), Trainer(data)]
    trainers[0].train(1)
    assert not caplog.records
    trainers[1].train(1)
    assert "Two trainers read one distributed dataset" in caplog.text
