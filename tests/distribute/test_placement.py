"""Placements: values that say where state and batches are."""

import jax
import numpy as np
import pytest

import armillary


def strategies():
    devices = jax.devices()[:4]
    return [
        armillary.OneDeviceStrategy("cpu:2"),
        armillary.MirroredStrategy(devices),
        armillary.CentralStorageStrategy(devices),
        armillary.ShardedStrategy({"data": 2, "fsdp": 2}, devices=devices),
    ]


@pytest.mark.parametrize("strategy", strategies(), ids=lambda s: type(s).__name__)
def test_a_strategy_shows_its_placement(strategy):
    placement = strategy.placement
    assert strategy.mesh is placement.mesh
    assert strategy.layout == placement.layout
    assert strategy.num_replicas_in_sync == placement.num_replicas
    assert strategy.platform == placement.platform == "cpu"
    assert strategy.peers.is_alone
    assert placement.peers.is_alone
    assert strategy.home is placement.home


def test_a_plan_gives_another_placement_and_takes_it_back():
    strategy = armillary.ShardedStrategy(
        {"data": 2, "fsdp": 2}, devices=jax.devices()[:4]
    )
    present = strategy.placement
    with strategy.described(16, "tpu") as mesh:
        assert dict(mesh.shape) == {"data": 8, "fsdp": 2, "tensor": 1}
        assert strategy.platform == "tpu"
        assert strategy.layout.num_shares == 16
    assert strategy.placement is present
    assert strategy.platform == "cpu"


def test_replicas_on_absent_devices_are_as_many_as_these():
    strategy = armillary.MirroredStrategy(jax.devices()[:4])
    with strategy.described(64, "cuda"):
        assert strategy.num_replicas_in_sync == 64
    assert strategy.num_replicas_in_sync == 4


def test_an_error_in_a_plan_puts_the_placement_back():
    strategy = armillary.MirroredStrategy(jax.devices()[:4])
    with pytest.raises(KeyError), strategy.described(8, "tpu"):
        raise KeyError
    assert strategy.num_replicas_in_sync == 4
    (batch,) = strategy.distribute_dataset([np.arange(8.0)])
    total = strategy.reduce("sum", strategy.run(np.sum, args=(batch,)))
    assert total == 28
