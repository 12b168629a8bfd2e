"""`Checkpoint(trainer=trainer)`: a `StandardTrainer` saves its place in the data."""

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

X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
DATA = {"x": X, "y": X @ np.array([1.0, -2.0, 3.0], "float32")}


class Trainer(armillary.StandardTrainer):
    """Has no strategy but the controller's, and data that is not distributed."""

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


@pytest.mark.parametrize(
    "data", [make_data, lambda: [make_data(), make_data(4)]], ids=["one", "two"]
)
def test_a_run_that_is_stopped_goes_on_bit_for_bit(data, tmp_path, caplog):
    whole = run(tmp_path / "whole", 13, data=data)
    stopped = run(tmp_path / "stopped", 3, 5, 13, data=data)
    np.testing.assert_array_equal(stopped, whole)
    assert "position of the training data" not in caplog.text


def test_a_checkpoint_without_a_position_is_restored_and_says_so(
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
    assert "1 of the program, left as they were:\n  trainer" in caplog.text


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
