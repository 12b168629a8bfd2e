"""What users write for devices, and the devices that are known."""

import pytest

from armillary.plan import Target
from armillary.plan._targets import TARGETS, parse_topology
from tests.mistakes import mistakes

MINE = Target(name="mine", platform="tpu", memory_bytes=1e9)


@pytest.mark.parametrize(
    ("text", "count", "per_host", "xla_name"),
    [
        ("v5e:16x16", 256, None, "v5e:16x16"),
        ("V5P:8x8x8", 512, None, "v5p:8x8x8"),
        ("h100:8x8", 64, 8, "1x8x8"),
        ("b200:1x8", 8, 8, "1x1x8"),
    ],
)
def test_topologies(text, count, per_host, xla_name):
    topology = parse_topology(text)
    assert topology.num_devices == count
    assert topology.devices_per_host == per_host
    assert topology.xla_name == xla_name


def test_a_target_of_the_users_own_takes_any_name():
    topology = parse_topology("v9:2x2", MINE)
    assert topology.target is MINE
    assert topology.num_devices == 4


@mistakes(
    {
        ValueError: {
            "`topology` is 'v5e', which describes no devices": lambda: parse_topology(
                "v5e"
            ),
            "`topology` is 'v5e:0x4', which": lambda: parse_topology("v5e:0x4"),
            "`topology` is 256, which": lambda: parse_topology(256),
            'or a number of devices such as "256"': lambda: parse_topology(
                0, abstract=True
            ),
            "The name 'k80' is that of no known device": lambda: parse_topology(
                "k80:1x8"
            ),
            'Write "h100:1x8" for one host': lambda: parse_topology("h100:8"),
        }
    }
)
def test_what_describes_no_devices_is_an_error(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_known_device_has_its_memory_and_what_its_compiler_must_know(target):
    assert 10e9 < target.memory_bytes < 1e12
    assert (target.config is not None) == (target.platform == "cuda")
