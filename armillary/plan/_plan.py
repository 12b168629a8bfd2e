"""Plans a training step for devices that are not there, and shows the plan."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from armillary._checks import check_instance, check_one_of, check_positive_int
from armillary._format import as_text, format_bytes, format_scaled, make_table
from armillary._traceback import hides_frames
from armillary.plan._compiler import compile_loop, export_loop
from armillary.plan._costs import (
    COLLECTIVE_KINDS,
    Collective,
    count_rounds,
    find_traced,
)
from armillary.plan._targets import Target, Topology, parse_topology
from armillary.plan._traffic import find_traffic
from armillary.trainer._described import described
from armillary.trainer._standard_trainer import StandardTrainer
from armillary.xla._flops import count_flops

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 88
_FINE_ENOUGH = 1 / 8  # of the largest batch
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
        is_abstract: True if nothing was compiled.
        accumulate_steps: Parts in which a step takes its batch.
        collectives: The data that devices send each other.
        host_transfers: Operations inside loops that reach the host.
        memory: The memory that each device needs. `None` if nothing was compiled, or if
            the compiler could not fit the program into the memory.
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
    is_abstract: bool = True
    accumulate_steps: int = 1
    collectives: tuple[Collective, ...] = ()
    host_transfers: tuple[str, ...] = ()
    memory: Memory | None = None
    compile_seconds: float | None = None
    largest_batch: int | None = None

    @property
    def fits(self) -> bool | None:
        """True if the step fits into the memory of a device; `None` if unknown."""
        if self.is_abstract or self.topology.target is None:
            return None
        if self.memory is None:
            return False
        return self.memory.total <= self.topology.target.memory_bytes

    @property
    def num_replicas(self) -> int:
        """The number of replicas; one if the compiler divides the step."""
        return 1 if self.is_divided else math.prod(self.mesh.values())

    @property
    def is_divided(self) -> bool:
        """True if the compiler divides the step, as under `ShardedStrategy`."""
        return len(self.mesh) > 1

    def of_step(self, kind: str | None = None) -> list[Collective]:
        """Returns the collectives of every step, of one kind or of all."""
        of_step = [each for each in self.collectives if each.is_of_step]
        if kind is None:
            return of_step
        return [each for each in of_step if each.kind == kind]

    def as_json(self) -> str:
        """Returns the plan as a text of JSON, with bytes, seconds and operations."""
        target = self.topology.target
        memory = self.memory
        record = {_LONGER_NAMES.get(name, name): x for name, x in vars(self).items()}
        record |= {
            "topology": self.topology.text,
            "device": target and target.name,
            "memory_bytes": target and target.memory_bytes,
            "num_replicas": self.num_replicas,
            "fits": self.fits,
            "memory": memory and {**asdict(memory), "total": memory.total},
            "collectives": [asdict(each) for each in self.collectives],
        }
        return json.dumps(record, indent=2)

    def __rich__(self) -> "Table":
        state = "traced, not compiled" if self.is_abstract else "compiled, not run"
        sections = (self._work(), self._memory(), self._traffic())
        title = f"{self.topology.text}: {state}"
        return make_table(["", ""], *filter(None, sections), title=title)

    def __str__(self) -> str:
        return as_text(self.__rich__(), _WIDTH)

    def _work(self) -> list[tuple[str, str]]:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        replicas = f"1, over {sizes}" if self.is_divided else str(self.num_replicas)
        batch = f"{self.per_replica_batch} each, {self.global_batch} global"
        if self.accumulate_steps > 1:
            batch += f", in {self.accumulate_steps} parts"
        if not self.global_batch:
            batch = "none: the steps make their own data"
        held = f"{format_bytes(self.held_bytes)} on each device"
        if self.held_bytes < self.state_bytes:
            held = f"{format_bytes(self.state_bytes)}, {held}"
        flops = [f"{format_scaled(n, 'FLOP')} {kind}" for kind, n in self.flops.items()]
        return [
            ("replicas", replicas),
            ("batch", batch),
            ("steps in a program", f"up to {self.steps_per_program}"),
            ("state", held),
            ("products, per device", f"{', '.join(flops) or '0 FLOP'} a step"),
        ]

    def _memory(self) -> list[tuple[str, str]]:
        target = self.topology.target
        memory = self.memory
        if self.is_abstract or target is None:
            return []
        verdict = "fits" if self.fits else "does not fit"
        need = format_bytes(memory.total) if memory else "the compiler needs more"
        rows = [("memory", f"{verdict}: {need} of {format_bytes(target.memory_bytes)}")]
        parts = asdict(memory) if memory else {}
        for name, size in parts.items():
            rows.append((f"  {name.replace('_', ' ')}", format_bytes(size)))
        if self.largest_batch is not None:
            rows.append(("largest batch", f"{self.largest_batch} on each replica"))
        rows.append(("compiled in", f"{self.compile_seconds or 0.0:.1f} s here"))
        return rows

    def _traffic(self) -> list[tuple[str, str]]:
        rows = []
        for kind in COLLECTIVE_KINDS:
            found = self.of_step(kind)
            if found:
                rows.append((kind, self._describe_kind(kind, found)))
        others = self._describe_others()
        if others:
            rows.append(("not in every step", others))
        if not rows:
            is_unknown = self.is_abstract and self.is_divided
            unknown = "not known before a compiler divides the step"
            rows.append(("collectives", unknown if is_unknown else "none"))
        if self.memory is not None:
            hosts = ", ".join(self.host_transfers) or "none"
            rows.append(("host, inside the loop", hosts))
        return rows

    def _describe_kind(self, kind: str, found: list[Collective]) -> str:
        """Returns the bytes, the number and the order of collectives of one kind."""
        size = format_bytes(sum(each.times * each.num_bytes for each in found))
        count = sum(each.times for each in found)
        how = "before a compiler combines them"
        if not self.is_abstract:
            num_asynchronous = sum(each.is_asynchronous for each in found)
            rounds = count_rounds(found, kind)
            how = f"{rounds} after each other; {num_asynchronous} asynchronous"
        return f"{size} a step in {count}, {how}"

    def _describe_others(self) -> str:
        """Returns the collectives that run once a loop or call, or conditionally."""
        counts: Counter[str] = Counter()
        for each in self.collectives:
            if not each.is_of_step:
                when = "under a condition" if each.scope == "step" else each.scope
                counts[f"{each.kind} {when}"] += 1
        return ", ".join(f"{count} {name}" for name, count in counts.items())


@hides_frames
def plan(
    trainer: StandardTrainer,
    topology: str | int,
    *,
    steps_per_loop: int | None = None,
    per_replica_batch: int | None = None,
    find_batch: bool = False,
    target: Target | None = None,
    abstract: bool = False,
) -> Plan:
    """Compiles the loop of a trainer for devices that are not there.

    The same code makes the program as for a run: many steps, with the state donated.
    The trainer does not change, and no device is used. Each replica keeps the batch
    that it has now, so the global batch grows with the devices. Under
    `ShardedStrategy`, each part of a batch keeps its size in the same way: see
    `ShardedStrategy.described`.

    Args:
        trainer: The trainer, under a `MirroredStrategy` or a `ShardedStrategy`.
        topology: A TPU slice such as `"v5e:16x16"`, or hosts by GPUs such as
            `"h100:8x8"`. An abstract plan takes a number of devices too.
        steps_per_loop: As for the `Controller`. `None` uses the number of the last
            loop.
        per_replica_batch: Examples of each replica, or part of a batch, instead of the
            current number.
        find_batch: True to find the largest batch that fits, to an eighth. The loop is
            compiled for several batches, one after the other.
        target: The kind of device, if its name is not known.
        abstract: True to compile nothing. Then no compiler is needed, and the plan has
            no memory.

    Raises:
        TypeError: If `trainer` is not a `StandardTrainer`.
        ValueError: If `topology` describes no devices, the strategy is for one device,
            `find_batch` is combined with `abstract`, or a batch is chosen for a trainer
            without data.
        PlanError: If there is no compiler for the devices, or it fails.
    """
    fix = "Derive from `armillary.StandardTrainer`, whose loop is planned."
    check_instance("trainer", trainer, StandardTrainer, fix)
    check_one_of("find_batch", find_batch, (True, False))
    check_one_of("abstract", abstract, (True, False))
    if steps_per_loop is not None:
        check_positive_int("steps_per_loop", steps_per_loop)
    if per_replica_batch is not None:
        check_positive_int("per_replica_batch", per_replica_batch)
    fix = 'Use `armillary.plan.find_target("h100")`, or describe one.'
    check_instance("target", target, Target | None, fix)
    if find_batch and abstract:
        raise ValueError(
            "`find_batch` is True, but it compiles to see what fits, and with "
            "`abstract=True` nothing is compiled. Leave one of them out."
        )
    if trainer.train_dataset is None and (find_batch or per_replica_batch is not None):
        name = "find_batch" if find_batch else "per_replica_batch"
        value = True if find_batch else per_replica_batch
        raise ValueError(
            f"`{name}` is {value}, but `train_dataset` of the trainer is None: its "
            "steps make their own data and take no batch. Leave it out."
        )

    devices = parse_topology(topology, target, abstract=abstract)
    platform = "tpu" if devices.target is None else devices.target.platform

    def make(batch: int | None) -> Plan:
        with described(
            trainer,
            devices.num_devices,
            platform,
            steps_per_loop=steps_per_loop,
            per_replica_batch=batch,
        ) as loop:
            if abstract:
                export_loop(loop, platform)
            compiled = None if abstract else compile_loop(loop, devices)
            flops = count_flops(loop.step)

        made = Plan(
            topology=devices,
            mesh=dict(loop.mesh.shape),
            per_replica_batch=loop.share_size,
            global_batch=loop.share_size * loop.num_shares,
            steps_per_program=loop.capacity,
            state_bytes=loop.state_bytes,
            held_bytes=loop.held_bytes,
            flops=flops,
            is_abstract=abstract,
            accumulate_steps=loop.num_parts,
        )
        if made.is_divided:
            # The traced program is the step of all devices together.
            made.flops = {kind: n / devices.num_devices for kind, n in flops.items()}
        if abstract:
            made.collectives = tuple(find_traced(loop.step, devices.num_devices))
        if compiled is not None:
            traffic = find_traffic(compiled.text, loop.depth, devices.num_devices)
            made.collectives = traffic.collectives
            made.host_transfers = traffic.host_transfers
            made.compile_seconds = compiled.seconds
            made.memory = Memory(**compiled.memory, batches_ahead=loop.chunk_bytes)
        return made

    found = make(per_replica_batch)
    if find_batch:

        def fits(batch: int) -> bool:
            return bool(make(batch).fits)

        found.largest_batch = find_largest(
            found.per_replica_batch, bool(found.fits), fits
        )
    return found


def find_largest(size: int, is_small: bool, fits: Callable[[int], bool]) -> int:
    """Returns the largest batch that fits, to an eighth; 0 for none.

    Args:
        size: The batch to begin with.
        is_small: True if this batch fits.
        fits: Returns whether another batch fits.
    """
    # The largest batch that is known to fit, and the smallest that does not.
    low = 0
    high = size
    if is_small:
        low = size
        high = 2 * size
        while fits(high):
            low = high
            high = 2 * high
    while high - low > max(1, int(low * _FINE_ENOUGH)):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
