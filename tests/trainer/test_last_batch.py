"""Tests that a last batch which no step can use is found before the first step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.data import InputOptions, from_arrays
from armillary.errors import BatchSizeError
from armillary.trainer._tracer import StepPrograms
from tests.tiers import slow_after_first

X = np.random.default_rng(0).normal(size=(50, 3)).astype("float32")
DATA = {"x": X, "y": X @ np.array([1, -2, 3], "float32")}


class Trainer(armillary.StandardTrainer):
    def __init__(self, num_replicas, num_parts, *, remainder=None, **options):
        self.strategy = armillary.MirroredStrategy(jax.devices()[:num_replicas])
        self.dataset = self.strategy.distribute_dataset(
            from_arrays(DATA, **{"batch_size": 16, **options}),
            InputOptions(remainder=remainder),
        )
        loop = armillary.StandardTrainerOptions(accumulate_steps=num_parts)
        super().__init__(self.dataset, loop)
        self.model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)

    def train_step(self, iterator):
        self.strategy.run(self.step_fn, args=(next(iterator),))

    def step_fn(self, batch):
        def loss_fn(rows):
            return jnp.mean((self.model(rows["x"])[:, 0] - rows["y"]) ** 2)

        _, gradients = armillary.value_and_grad(
            loss_fn, self.model, batch=batch, op="mean"
        )
        gradients = armillary.all_reduce("mean", gradients)
        self.optimizer.update(self.model, gradients)


@slow_after_first(
    ("num_replicas", "num_parts", "remainder"),
    [
        *[(1, 4, None), (4, 1, None), (2, 2, None)],
        *[(2, 4, "exact"), (4, 2, "exact"), (4, 2, None)],
    ],
)
def test_a_last_batch_that_has_no_equal_parts_is_found_first(
    num_replicas, num_parts, remainder
):
    trainer = Trainer(num_replicas, num_parts, remainder=remainder)
    message = (
        "(?s)`train_dataset` has 50 examples in batches of 16, so the last batch of "
        "each pass has 2, .*`drop_remainder=True`.*`repeat=True`"
    )
    for _ in range(2):
        with pytest.raises(BatchSizeError, match=message):
            trainer.train(1)
    assert trainer.optimizer.step[...] == 0
    assert trainer.dataset.get_state()["source"] is None


@slow_after_first(
    ("num_replicas", "num_parts", "options"),
    [
        (1, 2, {}),
        (2, 4, {"drop_remainder": True}),
        (2, 4, {"repeat": True}),
        (2, 4, {"remainder": "drop"}),
        (2, 4, {"remainder": "pad"}),
        (2, 2, {"batch_size": 12, "remainder": "drop"}),
        (4, 1, {"remainder": "exact"}),
        (4, 1, {"drop_remainder": True}),
    ],
)
def test_a_last_batch_that_has_equal_parts_trains(num_replicas, num_parts, options):
    trainer = Trainer(num_replicas, num_parts, **options)
    trainer.train(3)
    trainer.train(1)
    assert trainer.optimizer.step[...] >= 3


def test_a_last_batch_that_replicas_cannot_share_names_the_place_of_the_options():
    with pytest.raises(BatchSizeError) as info:
        Trainer(4, 1).train(1)
    message = str(info.value)
    assert "has 2 examples, which 4 replicas cannot share" in message
    assert "`strategy.distribute_dataset(source, options)`" in message
    assert "`from_arrays(..., drop_remainder=True)`" in message
    assert "No step has run yet" in message


def test_a_place_of_another_batch_size_is_left_to_its_last_batch():
    other = Trainer(1, 1, batch_size=10)
    other.train(1)
    trainer = Trainer(1, 4)  # 40 examples are left: 16, 16 and 8.
    trainer.dataset.set_state(other.dataset.get_state())
    trainer.train(3)
    assert trainer.optimizer.step[...] == 3


def test_the_trace_of_the_last_batch_is_kept(monkeypatch):
    traced = []
    trace = StepPrograms._trace

    def count(programs, batches, active):
        traced.append(batches[0]["x"].shape)
        return trace(programs, batches, active)

    monkeypatch.setattr(StepPrograms, "_trace", count)
    Trainer(1, 2).train(4)
    assert traced == [(1, 16, 3), (1, 2, 3)]
