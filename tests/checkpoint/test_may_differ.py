"""Tests of `may_differ`: continuing a run whose program has changed."""

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.checkpoint import _put
from armillary.checkpoint._put import put_all
from armillary.errors import CheckpointMismatchError, DatasetStateError
from tests.peers import run_together


class Trainer(armillary.StandardTrainer):
    """Trains one layer."""

    def __init__(self, transform, num_examples):
        inputs = np.random.default_rng(0).normal(size=(num_examples, 3))
        source = armillary.data.from_arrays(
            {"x": inputs.astype("float32")},
            batch_size=4,
            shuffle_seed=0,
            repeat=True,
        )
        super().__init__(armillary.get_strategy().distribute_dataset(source))
        self.model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, transform, wrt=nnx.Param)

    def train_step(self, iterator):
        batch = next(iterator)
        self.optimizer.update(
            self.model,
            armillary.all_reduce(
                "sum",
                nnx.grad(lambda m: jnp.mean((m(batch["x"]) - 1) ** 2))(self.model),
            ),
        )


@pytest.fixture
def make(tmp_path):
    """Returns a function that makes a program, which restores what is there."""
    managers = []

    def make(may_differ=(), *, transform=None, num_examples=16, **options):
        trainer = Trainer(transform or optax.adam(0.1), num_examples)
        checkpoint = armillary.Checkpoint(
            model=trainer.model,
            optimizer=trainer.optimizer,
            train_dataset=trainer.train_dataset,
        )
        manager = armillary.CheckpointManager(
            checkpoint, tmp_path, may_differ=may_differ, **options
        )
        managers.append(manager)
        return armillary.Controller(
            global_step=trainer.optimizer.step,
            trainer=trainer,
            steps_per_loop=1,
            checkpoint_manager=manager,
        )

    yield make
    for manager in managers:
        manager.close()


def leaves_of(controller):
    leaves = controller.checkpoint_manager.checkpoint.read_leaves()
    return {path: np.array(leaf) for path, leaf in leaves.items()}


def position_of(controller):
    return controller.trainer.train_dataset.get_state()


PART, CHANGE = "optimizer/opt_state", {"transform": optax.sgd(0.1, momentum=0.9)}


def test_a_changed_part_begins_again_once_and_then_continues(make, caplog):
    first = make()
    first.train(3)
    with pytest.raises(CheckpointMismatchError, match=f"`may_differ='{PART}'`"):
        make(**CHANGE)
    fresh = {p: leaf for p, leaf in leaves_of(first).items() if p.startswith("model")}

    with caplog.at_level(logging.WARNING, logger="armillary"):
        second = make([PART, "train_dataset"], **CHANGE)
    assert int(second.global_step[...]) == 3
    for path, leaf in fresh.items():
        np.testing.assert_array_equal(leaves_of(second)[path], leaf)
    new = {p: leaf for p, leaf in leaves_of(second).items() if p.startswith(PART)}
    assert new
    assert not any(leaf.any() for leaf in new.values())
    # A part that may differ, but does not, is restored.
    assert position_of(second) == position_of(first)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"of the program, left as they were:\n  {PART}/" in record.getMessage()
    text = record.getMessage().replace("  - ", "  + ")
    assert f"\nDifferences that `may_differ` allows:\n  + {PART}/" in text
    # The state without the old part is not on the disk yet.
    assert not second.checkpoint_manager.has_saved_step()

    second.train(5)
    expected = leaves_of(second)
    assert any(leaf.any() for path, leaf in expected.items() if path.startswith(PART))
    caplog.clear()
    third = make([PART, "train_dataset"], **CHANGE)
    assert not caplog.records
    jax.tree.map(np.testing.assert_array_equal, leaves_of(third), expected)
    assert third.checkpoint_manager.has_saved_step()


@pytest.mark.slow
def test_data_that_have_grown_begin_again(make, caplog):
    line = "examples: 16 in the state, 20 in the program"
    changes = {"num_examples": 20, "checkpoint_interval": 4}
    first = make()
    first.train(3)
    expected = leaves_of(first)
    with pytest.raises(DatasetStateError, match=line) as info:
        make(**changes)
    (note,) = info.value.__notes__
    assert "`CheckpointManager(..., may_differ='train_dataset')`" in note

    with caplog.at_level(logging.WARNING, logger="armillary"):
        second = make("train_dataset", **changes)
    jax.tree.map(np.testing.assert_array_equal, leaves_of(second), expected)
    (record,) = caplog.records
    assert (
        "  ~ train_dataset: `state` was saved from other data, or from another order "
        f"of the data, so its position would be wrong here:\n  {line}"
    ) in record.getMessage()
    assert position_of(second)["source"] is None
    manager = second.checkpoint_manager
    assert (manager.is_due(6), manager.is_due(7)) == (False, True)
    assert not manager.has_saved_step()
    second.train(7)
    # Four batches of 4 examples are used, because it began at the first.
    assert position_of(second)["source"] == {
        "epoch": 0,
        "index": 16,
        "num_examples": 20,
    }
    third = make("train_dataset", **changes)
    assert position_of(third) == position_of(second)


def test_other_data_and_a_new_array_of_one_trainer_begin_again(tmp_path, caplog):
    def make(seed=0, may_differ=(), **arrays):
        source = armillary.data.from_arrays(
            {"x": np.ones((16, 3), "float32")}, batch_size=4, shuffle_seed=seed
        )
        state = {"w": jnp.zeros(3), **arrays}
        trainer = armillary.StepTrainer(
            lambda state, batch: ({**state, "w": state["w"] + 1}, {}), state, source
        )
        checkpoint = armillary.Checkpoint(trainer=trainer)
        manager = armillary.CheckpointManager(
            checkpoint, tmp_path, may_differ=may_differ
        )
        return trainer, manager

    trainer, manager = make()
    trainer.train(2)
    manager.save(2)
    manager.sync()

    _, manager = make(seed=1, extra=jnp.zeros(2))
    with pytest.raises(CheckpointMismatchError, match="='trainer/state/extra'`"):
        manager.restore_or_initialize()
    part = "trainer/state/extra"
    _, manager = make(seed=1, may_differ=part, extra=jnp.zeros(2))
    with pytest.raises(DatasetStateError) as info:
        manager.restore_or_initialize()
    (note,) = info.value.__notes__
    assert "`trainer (the position in its data)`" in note
    assert f"`CheckpointManager(..., may_differ=['trainer', '{part}'])`" in note
    assert "It restores the arrays, and the data begins at its start" in note
    assert note.endswith("For a new run, use a new directory.")
    trainer, manager = make(1, may_differ=["trainer", part], extra=jnp.zeros(2))
    manager.restore_or_initialize()
    text = caplog.text
    kept = "left as they were:\n  trainer (the position in its data)\n  trainer/state/"
    assert kept in text
    assert "~ trainer (the position in its data): `state` was saved from other" in text
    np.testing.assert_array_equal(trainer.state["w"], np.full(3, 2.0))
    np.testing.assert_array_equal(trainer.state["extra"], np.zeros(2))


def test_a_restore_by_hand_has_the_allowance_of_the_manager(make):
    first = make()
    first.train(3)
    path = first.checkpoint_manager.latest_checkpoint
    assert first.checkpoint_manager.has_saved_step()
    other = make([PART, "train_dataset"], **CHANGE).checkpoint_manager
    assert other.restore(path) == path
    assert not other.has_saved_step()
    with pytest.raises(CheckpointMismatchError, match=rf"\+ {PART}/"):
        other.checkpoint.read(path)
    kept = other.checkpoint.read(path, skip=PART).kept
    assert all(name.startswith(PART) for name in kept)


class Shifted:
    """A state that one of two processes refuses."""

    def __init__(self, accepts):
        self.accepts, self.index = accepts, 3

    def get_state(self):
        return self.index

    def set_state(self, state):
        if not self.accepts and state == 7:
            raise ValueError("no such position")
        self.index = state


def test_a_process_whose_data_fit_puts_them_back(monkeypatch):
    def run(peers):
        monkeypatch.setattr(_put, "get_peers", lambda: local.peers)
        local.peers = peers
        data, weights = Shifted(accepts=peers.index == 0), {"w": jnp.zeros(1)}
        checkpoint = armillary.Checkpoint(weights=weights, data=data)
        new = {"weights/w": jnp.ones(1)}
        refused = put_all(checkpoint, new, {"data": 7}, {"data"})
        return data.index, refused, float(weights["w"][0])

    local = threading.local()
    assert run_together(run) == [(3, {"data": "no such position"}, 1.0)] * 2
