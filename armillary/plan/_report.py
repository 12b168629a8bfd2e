"""What a plan says, as a table and as JSON."""

import functools
import io
import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from armillary._format import format_bytes, format_scaled
from armillary.distribute.replica._values import AXIS_NAME
from armillary.plan._targets import Estimate, Topology
from armillary.plan._traffic import KINDS, Collective, count_rounds

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 88
_UNKNOWN = "not known before a compiler divides the step"

_time = functools.partial(format_scaled, unit="s")


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
        target, estimate, memory = self.topology.target, self.estimate, self.memory
        record: dict[str, Any] = {
            "topology": self.topology.text,
            "device": None if target is None else target.name,
            "source": None if target is None else target.source,
            "num_replicas": self.num_replicas,
            "mesh": self.mesh,
            "per_replica_batch": self.per_replica_batch,
            "global_batch": self.global_batch,
            "steps_per_program": self.steps_per_program,
            "accumulate_steps": self.accumulate_steps,
            "state_bytes": self.state_bytes,
            "state_bytes_per_device": self.held_bytes,
            "is_abstract": self.is_abstract,
            "fits": self.fits,
            "memory_bytes": None if target is None else target.memory_bytes,
            "memory": memory and {**asdict(memory), "total": memory.total},
            "largest_batch": self.largest_batch,
            "flops_per_step": self.flops,
            "memory_bytes_per_step": self.step_bytes,
            "collectives": [
                {**asdict(each), "overlaps": dict(each.overlaps)}
                for each in self.collectives
            ],
            "host_transfers": list(self.host_transfers),
            "estimated_step_seconds": estimate
            and {
                **asdict(estimate),
                "overlapped": estimate.overlapped,
                "sequential": estimate.sequential,
                "bound": estimate.bound,
            },
            "compile_seconds": self.compile_seconds,
        }
        return json.dumps(record, indent=2)

    def __rich__(self) -> "Table":
        from rich.table import Table

        what = "traced, not compiled" if self.is_abstract else "compiled, not run"
        table = Table(title=f"{self.topology.text}: {what}", title_justify="left")
        table.add_column("")
        table.add_column("", overflow="fold")
        for rows in (self._work(), self._memory(), self._traffic(), self._time()):
            for row in rows:
                table.add_row(*row)
            if rows:
                table.add_section()
        return table

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=_WIDTH, highlight=False).print(self)
        return text.getvalue().rstrip("\n")

    def _work(self) -> list[tuple[str, str]]:
        flops = ", ".join(
            f"{format_scaled(count, 'FLOP')} {dtype}"
            for dtype, count in self.flops.items()
        )
        held = f"{format_bytes(self.held_bytes)} on each device"
        if self.held_bytes < self.state_bytes:
            held = f"{format_bytes(self.state_bytes)}, {held}"
        replicas = str(self.num_replicas)
        if self.is_divided:
            sizes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
            replicas = f"1, over {sizes}"
        batch = f"{self.per_replica_batch} each, {self.global_batch} global"
        if self.accumulate_steps > 1:
            batch += f", in {self.accumulate_steps} parts"
        return [
            ("replicas", replicas),
            ("batch", batch),
            ("steps in a program", f"up to {self.steps_per_program}"),
            ("state", held),
            ("products, per device", f"{flops or '0 FLOP'} a step"),
        ]

    def _memory(self) -> list[tuple[str, str]]:
        target, memory = self.topology.target, self.memory
        if self.is_abstract or target is None:
            return []
        has = f"of {format_bytes(target.memory_bytes)}"
        if memory is None:
            return [("memory", f"[bold]does not fit[/]: the compiler needs more {has}")]
        verdict = "fits" if self.fits else "[bold]does not fit[/]"
        rows = [("memory", f"{verdict}: {format_bytes(memory.total)} {has}")]
        rows += [
            (f"  {name.replace('_', ' ')}", format_bytes(size))
            for name, size in asdict(memory).items()
        ]
        if self.largest_batch is not None:
            rows.append(("largest batch", f"{self.largest_batch} on each replica"))
        return rows

    def _traffic(self) -> list[tuple[str, str]]:
        rows = [
            (kind, _describe(kind, found, self.is_abstract))
            for kind in KINDS
            if (found := self.of_step(kind))
        ]
        for each in self.of_step():
            if each.is_asynchronous:
                size = format_bytes(each.num_bytes)
                rows.append((f"  {each.kind}, {size}", _describe_overlaps(each)))
        others = Counter(
            f"{each.kind} {'under a condition' if each.scope == 'step' else each.scope}"
            for each in self.collectives
            if not each.is_of_step
        )
        if others:
            shown = ", ".join(f"{count} {name}" for name, count in others.items())
            rows.append(("not in every step", shown))
        if not rows:
            is_known = not (self.is_abstract and self.is_divided)
            rows.append(("collectives", "none" if is_known else _UNKNOWN))
        if not self.is_abstract and self.memory is not None:
            hosts = ", ".join(self.host_transfers) or "none"
            rows.append(("host, inside the loop", hosts))
        return rows

    def _time(self) -> list[tuple[str, str]]:
        estimate, target = self.estimate, self.topology.target
        if estimate is None or target is None:
            return []
        moved = format_bytes(self.step_bytes)
        low, high = _time(estimate.overlapped), _time(estimate.sequential)
        rows = [
            ("step, estimate", f"{low} if all overlaps, {high} if not"),
            ("  products", _time(estimate.compute)),
            ("  memory", f"{_time(estimate.memory)} for {moved}"),
            ("  collectives", _time(estimate.communication)),
            ("  from figures of", target.source),
        ]
        if self.compile_seconds is not None:
            rows.append(("compiled in", f"{self.compile_seconds:.1f} s here"))
        return rows


def _describe(kind: str, found: list[Collective], is_abstract: bool) -> str:
    size = format_bytes(sum(each.times * each.num_bytes for each in found))
    count = sum(each.times for each in found)
    if is_abstract:
        return f"{size} a step, {count} before a compiler combines them"
    rounds = count_rounds(found, kind)
    beside = sum(each.is_asynchronous for each in found)
    return f"{size} a step in {count}, {rounds} after each other; {beside} asynchronous"


def _describe_overlaps(collective: Collective) -> str:
    name, count = max(collective.overlaps, key=lambda pair: pair[1])
    total = sum(count for _, count in collective.overlaps)
    return f"runs beside {total} operations, {count} of them {name}"
