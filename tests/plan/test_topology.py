"""Tests of the names of devices that a plan accepts."""

import pytest

from armillary.plan import Target
from armillary.plan._targets import TARGETS, parse_topology

MINE = Target(name="mine", platform="tpu", memory_bytes=1e9)


@pytest.mark.parametrize(
    ("text", "count", "xla_name"),
    [
        ("v5e:16x16", 256, "v5e:16x16"),
        ("V5P:8x8x8", 512, "v5p:8x8x8"),
        ("h100:8x8", 64, "1x8x8"),
        ("b200:1x8", 8, "1x1x8"),
        ("4xv5e:8x8", 256, "v5e:8x8"),
        ("cpu:64", 64, "cpu:64"),
    ],
)
def test_topologies(text, count, xla_name):
    topology = parse_topology(text)
    assert topology.num_devices == count
    assert topology.xla_name == xla_name


def test_groups_with_slow_links_are_slices_or_hosts():
    texts = ("4xv5e:8x8", "h100:8x8", "cpu:2x4", "v5e:8x8", "cpu:64")
    groups = [parse_topology(text).num_groups for text in texts]
    # The hosts of a slice of TPUs are known only to its compiler.
    assert groups == [4, 8, 2, None, None]


def test_a_target_of_the_users_own_takes_any_name():
    topology = parse_topology("v9:2x2", MINE)
    assert topology.target is MINE
    assert topology.num_devices == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5e:0x4", "`topology` is 'v5e:0x4', which describes no devices"),
        ("k80:1x8", "The name 'k80' is not the name of a known device"),
        ("h100:8", 'Write "h100:1x8" for one host'),
        ("2xh100:4x8", 'Write "h100:8x8"'),
        ("0xv5e:4x4", "`topology` is '0xv5e:4x4', which describes no devices"),
        ("cpu:2x2x2", 'Write "cpu:8"'),
    ],
)
def test_a_topology_without_devices_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        parse_topology(text)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_known_device_has_its_memory_and_what_its_compiler_must_know(target):
    if target.platform != "cpu":
        assert 10e9 < target.memory_bytes < 1e12
    assert (target.config is not None) == (target.platform == "cuda")
