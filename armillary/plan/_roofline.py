"""Estimates the time of a step from published figures of a device.

A step takes as long as its arithmetic at the peak, its memory at full bandwidth, or its
collectives at that of the links. The estimate is a range: everything overlaps, or
collectives wait for the rest. Real steps reach a part of the peaks, and caches save a
part of the memory's work; compare plans with each other, and a plan with a measured
step of yours.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from armillary.plan._topology import Topology
from armillary.plan._traffic import Collective


@dataclass(frozen=True)
class Estimate:
    """How long one step takes with all figures at their peak, in seconds.

    Attributes:
        compute: Its arithmetic, at the peak of each dtype.
        memory: What it reads and writes, at the bandwidth of the memory.
        communication: Its collectives, as a ring sends them at the bandwidth of links.
    """

    compute: float
    memory: float
    communication: float

    @property
    def overlapped(self) -> float:
        """The longest of the three: all of them run at the same time."""
        return max(self.compute, self.memory, self.communication)

    @property
    def sequential(self) -> float:
        """The time if collectives overlap with nothing."""
        return max(self.compute, self.memory) + self.communication

    @property
    def bound(self) -> str:
        """Which of the three is the longest."""
        return max(
            ("compute", "memory", "communication"), key=lambda name: getattr(self, name)
        )


def estimate_step(
    topology: Topology,
    flops: Mapping[str, float],
    memory_bytes: float,
    collectives: Iterable[Collective],
) -> Estimate:
    """Returns how long a step takes with all figures at their peak.

    Args:
        topology: The devices, of a known kind.
        flops: Operations on one device, by dtype. Dtypes without a peak count as
            `float32`.
        memory_bytes: What the step reads and writes on one device.
        collectives: Those of the step.
    """
    target = topology.target
    assert target is not None
    peaks = target.peak_flops
    return Estimate(
        compute=sum(
            count / peaks.get(dtype, peaks["float32"]) for dtype, count in flops.items()
        ),
        memory=memory_bytes / target.memory_bandwidth,
        communication=sum(
            each.times * count_sent_bytes(each) / _bandwidth(topology, each.group_size)
            for each in collectives
        ),
    )


def count_sent_bytes(collective: Collective) -> float:
    """Returns the bytes that each device sends for a collective around a ring."""
    share = (collective.group_size - 1) / max(collective.group_size, 1)
    if collective.kind == "all-reduce":
        return 2 * share * collective.num_bytes
    if collective.kind in ("collective-permute", "collective-broadcast"):
        return collective.num_bytes
    return share * collective.num_bytes


def _bandwidth(topology: Topology, group_size: int) -> float:
    target, per_host = topology.target, topology.devices_per_host
    assert target is not None
    if per_host is None or group_size <= per_host or target.network_bandwidth is None:
        return target.link_bandwidth
    # All devices of a host send over its network at the same time, each on its own
    # adapter, and a ring is as fast as its slowest link; reduced on the host first,
    # each adapter carries the part of its device.
    return min(target.link_bandwidth, per_host * target.network_bandwidth)
