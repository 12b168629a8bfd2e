import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import armillary
from armillary import MirroredStrategy


def test_all_devices_are_used_by_default():
    strategy = MirroredStrategy()
    assert strategy.num_replicas_in_sync == len(jax.local_devices()) == 8
    assert repr(strategy) == "MirroredStrategy(8 x cpu)"


def test_devices_may_be_named_in_any_order():
    strategy = MirroredStrategy(["cpu:3", "/cpu:1"])
    assert [device.id for device in strategy.mesh.devices] == [3, 1]


def test_state_is_copied_to_each_device(make_mirrored):
    strategy, count = make_mirrored(4), armillary.create_global_step()
    strategy.run(lambda: count.set_value(count[...] + 1))
    assert count[...].sharding == NamedSharding(strategy.mesh, PartitionSpec())
    assert len(count[...].addressable_shards) == 4


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


def test_platforms_cannot_be_mixed(monkeypatch):
    class Other:
        platform, id = "gpu", 0

    from armillary.distribute.strategies import _layouts

    def as_device(name, device):
        return Other() if device == "gpu:0" else jax.devices()[0]

    monkeypatch.setattr(_layouts, "as_device", as_device)
    with pytest.raises(ValueError) as caught:
        MirroredStrategy(["cpu:0", "gpu:0"])
    assert str(caught.value) == (
        "`devices` is ['cpu:0', 'gpu:0'], which mixes platforms: use one."
    )


def test_results_of_different_shape_are_stacked(make_mirrored):
    result = make_mirrored(2).run(lambda: (jnp.ones(3), jnp.int32(1)))
    assert result[0].stacked.shape == (2, 3) and result[1].stacked.shape == (2,)
