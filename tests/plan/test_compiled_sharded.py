"""Tests of a sharded transformer, compiled for TPUs and GPUs that are not there.

These tests need the wheels of the compilers: see `test_compiled.py`.
"""

from functools import cache

import armillary
from armillary.plan import Plan, plan
from armillary.testing import assert_strategies_agree
from tests.plan.test_compiled import pytestmark as pytestmark
from tests.plan.test_compiled import topology as topology
from tests.plan.transformer import BATCH_SIZE, Trainer, make_trainer

SHAPE = {"fsdp": 2, "tensor": 2}


@cache
def make_plan(topology: str) -> Plan:
    return plan(make_trainer(SHAPE), topology)


def test_the_transformer_trains_as_on_one_device():
    one = armillary.OneDeviceStrategy("cpu:0")
    divided = make_trainer(SHAPE).strategy
    assert_strategies_agree(Trainer, [one, divided], steps=3, ignore=["key/bias"])


def test_each_device_holds_and_donates_its_part(topology):
    found = make_plan(topology)
    count = found.topology.num_devices
    # Kernels by rules over four devices, the embedding over two; biases are whole.
    assert found.held_bytes < 0.32 * found.state_bytes
    assert found.mesh == {"data": count // 4, **SHAPE}
    assert found.global_batch == BATCH_SIZE * count // 4
    # Counters and what is small are not worth a donation.
    assert found.memory.donated > 0.9 * found.held_bytes
    # The layouts of a TPU pad what does not fill a tile.
    room = 1.4 * found.held_bytes + found.memory.batches_ahead
    assert found.memory.arguments < room
    assert found.fits


def test_parameters_are_gathered_and_nothing_reaches_the_host(topology):
    found = make_plan(topology)
    kinds = {each.kind for each in found.of_step()}
    assert "all-gather" in kinds
    assert kinds & {"all-reduce", "reduce-scatter"}
    assert found.host_transfers == ()
    # A step of ZeRO-3 moves parameters twice and gradients once, in parts of devices,
    # and activations over `tensor`. Whole copies of the state would be far more.
    moved = sum(each.num_bytes * each.times for each in found.of_step())
    assert moved < 4 * found.state_bytes
