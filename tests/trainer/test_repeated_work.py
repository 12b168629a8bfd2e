"""Batches that devices cannot share equally are reported, because some repeat work."""

import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary.trainer import _repeated_work
from tests.tiers import slow_after_first


@pytest.fixture(autouse=True)
def forget():
    """Lets each test warn again."""
    _repeated_work._warn.cache_clear()


def step(state, batch):
    change = armillary.all_reduce("mean", jnp.mean(batch))
    return state + change, {"change": change}


def train(strategy, batch_size, num_loops=2):
    rows = np.arange(96, dtype=np.float32)
    data = armillary.data.from_arrays(rows, batch_size=batch_size, repeat=True)
    trainer = armillary.StepTrainer(step, jnp.zeros(8), data, strategy=strategy)
    for _ in range(num_loops):
        trainer.train(1)


@slow_after_first(
    ("mesh", "batch_size", "texts"),
    [
        ({"fsdp": 8}, 12, ["of 12 examples are not divided", "that 8 divides"]),
        ({"data": 2, "fsdp": 4}, 12, ["have 4 parts, but 8 devices"]),
        ({"data": 2, "fsdp": 4}, 6, ["have 2 parts, but 8 devices"]),
        ({"data": 2, "tensor": 4}, 3, ["are not divided, but 2 devices"]),
    ],
)
def test_devices_that_repeat_work_are_reported_once(caplog, mesh, batch_size, texts):
    train(armillary.ShardedStrategy(mesh), batch_size)

    (message,) = [text for text in caplog.messages if "repeat the work" in text]
    for text in texts:
        assert text in message


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: armillary.ShardedStrategy({"fsdp": 8}),
        lambda: armillary.ShardedStrategy({"data": 4, "tensor": 2}),
        lambda: armillary.MirroredStrategy(),
        lambda: armillary.OneDeviceStrategy("cpu:0"),
    ],
)
def test_a_batch_that_all_devices_share_is_not_reported(caplog, strategy):
    train(strategy(), batch_size=16)
    assert "repeat the work" not in caplog.text
