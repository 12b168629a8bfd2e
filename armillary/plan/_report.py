"""What a plan says, as a table and as JSON."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from armillary._format import as_text, format_bytes, format_scaled, make_table
from armillary.distribute.replica._values import AXIS_NAME
from armillary.plan._costs import KINDS, Collective, Estimate, count_rounds
from armillary.plan._targets import Topology

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 88
_LONGER_NAMES = {
    "held_bytes": "state_bytes_per_device",
    "flops": "flops_per_step",
    "step_bytes": "memory_bytes_per_step",
    "estimate": "estimated_step_seconds",
}


@dataclass(frozen=True)
class Memory:
    """Bytes on each device.

    Attributes:
        arguments: What the program takes: the state, and the batches of its steps.
        donated: How much of that its outputs take over.
        temporaries: What it needs while it runs.
        outputs: What it leaves.
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
        """What a device must have."""
        return (
            self.arguments
            - self.donated
            + self.temporaries
            + self.outputs
            + self.code
            + self.batches_ahead
        )


@dataclass
class Plan:
    """What is known of a training step on devices that are not there.

    Printed, it is a table.

    Attributes:
        topology: The devices.
        mesh: How many devices there are along each axis of the strategy's mesh:
            `replica`, or `data`, `fsdp` and `tensor`.
        per_replica_batch: Examples of each replica in a step; under `ShardedStrategy`,
            of each part of the batch.
        global_batch: Examples of a step on all devices.
        steps_per_program: Most steps of one call of the device.
        accumulate_steps: Parts in which a step takes its batch.
        state_bytes: Bytes of the state.
        held_bytes: How many of them each device holds.
        flops: Operations of one step on one device in products and convolutions, by
            dtype; as traced, without what a compiler computes twice. Under
            `ShardedStrategy`, an equal share of those of the step.
        is_abstract: Whether nothing was compiled.
        collectives: What devices send each other.
        host_transfers: Operations inside loops that reach the host.
        memory: What each device must hold. `None` if it was not compiled, or the
            compiler found no way to fit it.
        step_bytes: What a step reads and writes in the memory of a device.
        estimate: The time of a step, from published figures.
        compile_seconds: How long the compiler took here.
        largest_batch: The largest batch of a replica that fits, if it was looked for.
    """

    topology: Topology
    mesh: dict[str, int]
    per_replica_batch: int
    global_batch: int
    steps_per_program: int
    state_bytes: int
    held_bytes: int
    flops: dict[str, float]
    is_abstract: bool = True
    collectives: tuple[Collective, ...] = ()
    host_transfers: tuple[str, ...] = ()
    memory: Memory | None = None
    step_bytes: int | None = None
    estimate: Estimate | None = None
    compile_seconds: float | None = None
    largest_batch: int | None = None
    accumulate_steps: int = 1

    @property
    def fits(self) -> bool | None:
        """Whether it fits into the memory of a device; `None` if that is not known."""
        if self.is_abstract or self.topology.target is None:
            return None
        if self.memory is None:
            return False
        return self.memory.total <= self.topology.target.memory_bytes

    @property
    def num_replicas(self) -> int:
        """How many replicas the devices run: one, if it spans all of them."""
        return self.mesh.get(AXIS_NAME, 1)

    @property
    def is_divided(self) -> bool:
        """Whether the compiler divides the step, as under `ShardedStrategy`."""
        return AXIS_NAME not in self.mesh

    def of_step(self, kind: str | None = None) -> list[Collective]:
        """Returns the collectives of every step, of one kind or of all."""
        return [
            each
            for each in self.collectives
            if each.is_of_step and kind in (None, each.kind)
        ]

    def as_json(self) -> str:
        """Returns the plan as a text of JSON, with bytes, seconds and operations."""
        target, memory, estimate = self.topology.target, self.memory, self.estimate
        record = {_LONGER_NAMES.get(name, name): x for name, x in vars(self).items()}
        record |= {
            "topology": self.topology.text,
            "device": None if target is None else target.name,
            "source": None if target is None else target.source,
            "memory_bytes": None if target is None else target.memory_bytes,
            "num_replicas": self.num_replicas,
            "fits": self.fits,
            "memory": memory and {**asdict(memory), "total": memory.total},
            "collectives": [
                {**asdict(each), "overlaps": dict(each.overlaps)}
                for each in self.collectives
            ],
        }
        if estimate is not None:
            names = ("overlapped", "sequential", "bound")
            derived = {name: getattr(estimate, name) for name in names}
            record["estimated_step_seconds"] = {**asdict(estimate), **derived}
        return json.dumps(record, indent=2)

    def __rich__(self) -> "Table":
        what = "traced, not compiled" if self.is_abstract else "compiled, not run"
        sections = (self._work(), self._memory(), self._traffic(), self._time())
        title = f"{self.topology.text}: {what}"
        return make_table(["", ""], *filter(None, sections), title=title)

    def __str__(self) -> str:
        return as_text(self.__rich__(), _WIDTH)

    def _work(self) -> list[tuple[str, str]]:
        flops = ", ".join(
            f"{format_scaled(count, 'FLOP')} {dtype}"
            for dtype, count in self.flops.items()
        )
        held = f"{format_bytes(self.held_bytes)} on each device"
        if self.held_bytes < self.state_bytes:
            held = f"{format_bytes(self.state_bytes)}, {held}"
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        count = self.num_replicas
        batch = f"{self.per_replica_batch} each, {self.global_batch} global"
        if self.accumulate_steps > 1:
            batch += f", in {self.accumulate_steps} parts"
        return [
            ("replicas", f"1, over {sizes}" if self.is_divided else str(count)),
            ("batch", batch),
            ("steps in a program", f"up to {self.steps_per_program}"),
            ("state", held),
            ("products, per device", f"{flops or '0 FLOP'} a step"),
        ]

    def _memory(self) -> list[tuple[str, str]]:
        target, memory = self.topology.target, self.memory
        if self.is_abstract or target is None:
            return []
        verdict = "fits" if self.fits else "does not fit"
        need = (
            "the compiler needs more" if memory is None else format_bytes(memory.total)
        )
        rows = [("memory", f"{verdict}: {need} of {format_bytes(target.memory_bytes)}")]
        for name, size in asdict(memory).items() if memory else ():
            rows.append((f"  {name.replace('_', ' ')}", format_bytes(size)))
        if self.largest_batch is not None:
            rows.append(("largest batch", f"{self.largest_batch} on each replica"))
        return rows

    def _traffic(self) -> list[tuple[str, str]]:
        rows = []
        for kind in KINDS:
            if found := self.of_step(kind):
                size = format_bytes(sum(each.times * each.num_bytes for each in found))
                count = sum(each.times for each in found)
                how = "before a compiler combines them"
                if not self.is_abstract:
                    beside = sum(each.is_asynchronous for each in found)
                    rounds = count_rounds(found, kind)
                    how = f"{rounds} after each other; {beside} asynchronous"
                rows.append((kind, f"{size} a step in {count}, {how}"))
        for each in self.of_step():
            if each.is_asynchronous:
                name, count = max(each.overlaps, key=lambda pair: pair[1])
                total = sum(count for _, count in each.overlaps)
                beside = f"runs beside {total} operations, {count} of them {name}"
                rows.append((f"  {each.kind}, {format_bytes(each.num_bytes)}", beside))
        others = Counter(
            f"{each.kind} {'under a condition' if each.scope == 'step' else each.scope}"
            for each in self.collectives
            if not each.is_of_step
        )
        if others:
            shown = ", ".join(f"{count} {name}" for name, count in others.items())
            rows.append(("not in every step", shown))
        if not rows:
            is_unknown = self.is_abstract and self.is_divided
            unknown = "not known before a compiler divides the step"
            rows.append(("collectives", unknown if is_unknown else "none"))
        if not self.is_abstract and self.memory is not None:
            hosts = ", ".join(self.host_transfers) or "none"
            rows.append(("host, inside the loop", hosts))
        return rows

    def _time(self) -> list[tuple[str, str]]:
        estimate, target = self.estimate, self.topology.target
        if estimate is None or target is None:
            return []
        low, high = _seconds(estimate.overlapped), _seconds(estimate.sequential)
        moved = format_bytes(self.step_bytes)
        rows = [
            ("step, estimate", f"{low} if all overlaps, {high} if not"),
            ("  products", _seconds(estimate.compute)),
            ("  memory", f"{_seconds(estimate.memory)} for {moved}"),
            ("  collectives", _seconds(estimate.communication)),
            ("  from figures of", target.source),
        ]
        if self.compile_seconds is not None:
            rows.append(("compiled in", f"{self.compile_seconds:.1f} s here"))
        return rows


def _seconds(number: float) -> str:
    return format_scaled(number, "s")
