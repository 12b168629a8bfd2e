"""Tests of warnings about numbers that depend on how replicas share a batch.

Each program trains on one device and on four. A program gets a warning if and only if
its numbers differ. So the warnings have neither gaps nor false alarms here.
"""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from tests.distribute.share_steps import DATA, RIGHT, WRONG, follow, is_equal
from tests.tiers import slow_after_first


@slow_after_first("kind", WRONG)
def test_numbers_that_depend_on_the_share_are_found(kind, caplog):
    step, facts = WRONG[kind]

    assert not is_equal(step)

    message = caplog.messages[0]
    assert "share_steps.py:" in message
    assert "4 replicas" in message or "over replicas" in message
    for fact in facts:
        assert fact in message


@slow_after_first("kind", RIGHT)
def test_numbers_of_the_whole_batch_are_fine(kind, caplog):
    assert is_equal(RIGHT[kind])

    assert caplog.messages == []


class Normalized(nnx.Module):
    """A model with batch normalization, over one replica's share by default."""

    def __init__(self, **options):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs, **options)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))[:, 0]


@slow_after_first(
    "options",
    [{}, {"use_fast_variance": False}, {"use_scale": False}, {"momentum": 0.5}],
    ids=str,
)
def test_batch_normalization_is_accepted(options, caplog):
    strategy = armillary.MirroredStrategy(jax.devices()[:4])
    model = Normalized(**options)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    (batch,) = strategy.distribute_dataset([DATA])

    def step(batch):
        def loss_fn(model):
            return ((model(batch["x"]) - batch["y"]) ** 2).mean()

        gradients = armillary.all_reduce("mean", nnx.grad(loss_fn)(model))
        optimizer.update(model, gradients)

    strategy.run(step, args=(batch,))

    assert caplog.messages == []


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_a_sum_that_the_end_of_the_step_averages_is_found(reduce, caplog):
    def step(state, batch):
        return {
            "total": follow(state["total"], getattr(batch["x"], reduce)(axis=0))
        }, {}

    trainer = armillary.StepTrainer(
        step,
        {"total": np.ones(3, np.float32)},
        armillary.data.from_arrays(DATA, batch_size=16),
        strategy=armillary.MirroredStrategy(jax.devices()[:4]),
        kinds={"total": "mean"},
    )
    trainer.train(1)

    if reduce == "mean":
        assert caplog.messages == []
        return
    [message] = caplog.messages
    assert "The mean of `state['total']` over replicas" in message
    assert "sum over the 4 examples" in message
    assert "4 times smaller" in message
