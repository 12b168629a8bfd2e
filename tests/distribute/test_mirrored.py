import jax
import numpy as np
import pytest

from armillary import MirroredStrategy


def test_all_devices_are_used_by_default():
    strategy = MirroredStrategy()
    assert strategy.num_replicas_in_sync == len(jax.local_devices()) == 8
    assert repr(strategy) == "MirroredStrategy(8 x cpu)"


def test_devices_may_be_named_in_any_order():
    strategy = MirroredStrategy(["cpu:3", "/cpu:1"])
    assert [device.id for device in strategy.mesh.devices] == [3, 1]


def test_batches_are_split_over_devices(make_mirrored):
    strategy = make_mirrored(4)
    (batch,) = strategy.distribute_dataset([np.arange(8)])
    shards = batch.stacked.addressable_shards
    assert [np.asarray(shard.data).tolist() for shard in shards] == [
        [[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], r"`devices` is \[\], but it must be a sequence of at least one device"),
        ("cpu:0", "`devices` is 'cpu:0', but it must be a sequence"),
        (["cpu:0", "gpu:1"], "`devices` is 'gpu:1', but .* no such device.* cpu:7: p"),
        (["cpu:0", "cpu:1", "/cpu:0"], "which repeats a device. Name each device once"),
    ],
)
def test_wrong_devices_are_errors(devices, message):
    with pytest.raises(ValueError, match=message):
        MirroredStrategy(devices)
