"""The figures of a plan: memory, arithmetic and traffic of a training step."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from armillary._format import as_text
from armillary.plan._costs import Collective
from armillary.plan._peak import Tensor
from armillary.plan._table import tabulate
from armillary.plan._targets import Topology

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 88
_LONGER_NAMES = {
    "held_bytes": "state_bytes_per_device",
    "flops": "flops_per_step",
}


@dataclass(frozen=True)
class Memory:
    """Bytes on each device.

    Attributes:
        arguments: The inputs of the program: the state, and the batches of its steps.
        donated: The part of the arguments whose memory the outputs reuse.
        temporaries: The memory that the program needs while it runs.
        outputs: The results of the program.
        code: The program itself.
        batches_ahead: The batches of the next call, which wait on the device.
    """

    arguments: int
    donated: int
    temporaries: int
    outputs: int
    code: int
    batches_ahead: int

    @property
    def total(self) -> int:
        """The memory that a device must have."""
        return sum(vars(self).values()) - 2 * self.donated


@dataclass(frozen=True)
class Variant:
    """The same loop with other options, compiled for the same devices.

    Attributes:
        options: The options that differ, by name.
        memory: The memory that each device needs. `None` if the loop cannot have these
            options, or if the compiler could not fit the program into the memory.
        error: The reason why the loop cannot have these options; `None` if it can.
    """

    options: Mapping[str, Any]
    memory: Memory | None
    error: str | None = None

    @property
    def name(self) -> str:
        """The options as text, such as `accumulate_steps=4`."""
        return ", ".join(f"{key}={value}" for key, value in self.options.items())


@dataclass
class Plan:
    """Memory, time and traffic of a training step on devices that are not there.

    `print(plan)` shows a table.

    Attributes:
        topology: The devices.
        mesh: The number of devices along each axis of the strategy's mesh: `replica`
            (or the strategy's `axis_name`), or `data`, `fsdp` and `tensor`.
        per_replica_batch: Examples of each replica in a step; under `ShardedStrategy`,
            of each part of the batch.
        global_batch: Examples of a step on all devices.
        steps_per_program: The largest number of steps in one call of the device.
        state_bytes: Bytes of the state.
        held_bytes: Bytes of the state that each device holds.
        flops: Operations of one step on one device in products and convolutions, by
            dtype. They are counted in the traced program, so operations that a compiler
            repeats count once. Under `ShardedStrategy`, an equal share of the
            operations of the step.
        is_divided: True if the compiler divides the step, as under `ShardedStrategy`.
        is_abstract: True if nothing was compiled.
        accumulate_steps: Parts in which a step takes its batch.
        num_groups: The number of groups of devices with slow links between them: slices
            of TPUs, hosts of GPUs, or the groups of the strategy's `dcn`.
        collectives: The data that devices send each other.
        host_transfers: Operations inside loops that reach the host.
        memory: The memory that each device needs. `None` if nothing was compiled, or if
            the compiler could not fit the program into the memory.
        peak: The temporaries that a device holds when it needs the most memory, the
            largest first. Empty if the compiler did not report them.
        variants: The same loop with other options, as given to `plan`.
        compile_seconds: The time of the compiler on this machine.
        largest_batch: The largest batch of a replica that fits, if `find_batch` was
            set.
    """

    topology: Topology
    mesh: dict[str, int]
    per_replica_batch: int
    global_batch: int
    steps_per_program: int
    state_bytes: int
    held_bytes: int
    flops: dict[str, float]
    is_divided: bool = False
    is_abstract: bool = True
    accumulate_steps: int = 1
    num_groups: int = 1
    collectives: tuple[Collective, ...] = ()
    host_transfers: tuple[str, ...] = ()
    memory: Memory | None = None
    peak: tuple[Tensor, ...] = field(default=(), repr=False)
    variants: tuple[Variant, ...] = ()
    compile_seconds: float | None = None
    largest_batch: int | None = None

    @property
    def fits(self) -> bool | None:
        """True if the step fits into the memory of a device; `None` if unknown."""
        target = self.topology.target
        if self.is_abstract or target is None or target.memory_bytes is None:
            return None
        if self.memory is None:
            return False
        return self.memory.total <= target.memory_bytes

    @property
    def num_replicas(self) -> int:
        """The number of replicas; one if the compiler divides the step."""
        return 1 if self.is_divided else math.prod(self.mesh.values())

    @property
    def slow_bytes(self) -> int:
        """The bytes that each device sends in a step over slow links.

        They are the bytes of all collectives with a group that has slow links between
        its devices. A library of collectives may send a part of them over fast links.
        """
        return sum(
            collective.times * collective.num_bytes
            for collective in self.of_step()
            if collective.is_slow
        )

    def of_step(self, kind: str | None = None) -> list[Collective]:
        """Returns the collectives of every step, of one kind or of all."""
        of_step = [
            collective for collective in self.collectives if collective.is_of_step
        ]
        if kind is None:
            return of_step
        return [collective for collective in of_step if collective.kind == kind]

    def as_json(self) -> str:
        """Returns the plan as a text of JSON, with bytes, seconds and operations."""
        target = self.topology.target
        record = {_LONGER_NAMES.get(name, name): x for name, x in vars(self).items()}
        record |= {
            "topology": self.topology.text,
            "device": target and target.name,
            "memory_bytes": target and target.memory_bytes,
            "num_replicas": self.num_replicas,
            "fits": self.fits,
            "memory": _record_memory(self.memory),
            "peak": [asdict(value) for value in self.peak],
            "variants": [
                {
                    "options": dict(variant.options),
                    "memory": _record_memory(variant.memory),
                    "error": variant.error,
                }
                for variant in self.variants
            ],
            "collectives": [asdict(collective) for collective in self.collectives],
            "slow_bytes": self.slow_bytes,
        }
        return json.dumps(record, indent=2, default=str)

    def __rich__(self) -> "Table":
        return tabulate(self)

    def __str__(self) -> str:
        return as_text(self.__rich__(), _WIDTH)


def _record_memory(memory: Memory | None) -> dict[str, int] | None:
    return memory and {**asdict(memory), "total": memory.total}
