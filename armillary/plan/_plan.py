"""Plans a training step for devices that are not there."""

import os
from collections.abc import Callable

from armillary._checks import (
    check_instance,
    check_one_of,
    check_path,
    check_positive_int,
)
from armillary._traceback import hides_frames
from armillary.plan._compiler import compile_loop, export_loop
from armillary.plan._costs import count_flops, estimate_step, find_traced
from armillary.plan._report import Memory, Plan
from armillary.plan._targets import Target, parse_topology
from armillary.plan._traffic import find_traffic
from armillary.trainer._described import described
from armillary.trainer._standard_trainer import StandardTrainer

_FINE_ENOUGH = 1 / 8  # of the largest batch


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
    wheels: str | os.PathLike[str] | None = None,
) -> Plan:
    """Compiles the loop of a trainer for devices that are not there.

    It is the program that would run, made by the same code: many steps, with the state
    donated. Nothing of the trainer changes, and no device is touched. Each replica
    keeps the batch that it has now, so the global batch grows with the devices. Under
    `ShardedStrategy` so does each part of a batch: see `ShardedStrategy.described`.

    Args:
        trainer: The trainer, under a `MirroredStrategy` or a `ShardedStrategy`.
        topology: A TPU slice such as `"v5e:16x16"`, or hosts by GPUs such as
            `"h100:8x8"`. An abstract plan takes a number of devices too.
        steps_per_loop: As for the `Controller`. `None` takes that of the last loop.
        per_replica_batch: Examples of each replica, or part of a batch, in place of
            what it has now.
        find_batch: Whether to look for the largest batch that fits, to an eighth, by
            compiling for one after the other.
        target: The kind of device, if it is not a known one.
        abstract: Whether to compile nothing. Then no compiler is needed, and the plan
            has no memory and no estimate.
        wheels: A folder with the compiler, see `docs/plan.md`. `None` takes that of
            the environment variable `ARMILLARY_PLAN_WHEELS`, else what is installed.

    Raises:
        TypeError: If `trainer` is no `StandardTrainer`.
        ValueError: If `topology` describes no devices, the strategy is for one, or
            `find_batch` is asked of an abstract plan.
        PlanError: If there is no compiler for them, or it fails.
    """
    if not isinstance(trainer, StandardTrainer):
        raise TypeError(
            f"`trainer` is of type {type(trainer).__name__}, but a plan needs the loop "
            "of an `armillary.StandardTrainer`. Derive from it."
        )
    for name, value in (("find_batch", find_batch), ("abstract", abstract)):
        check_one_of(name, value, (True, False))
    for name, number in (
        ("steps_per_loop", steps_per_loop),
        ("per_replica_batch", per_replica_batch),
    ):
        if number is not None:
            check_positive_int(name, number)
    fix = 'Use `armillary.plan.find_target("h100")`, or describe one.'
    check_instance("target", target, Target | None, fix)
    if wheels is not None:
        check_path("wheels", wheels)
    if find_batch and abstract:
        raise ValueError(
            "`find_batch` is True, but it compiles to see what fits, and with "
            "`abstract=True` nothing is compiled. Leave one of them out."
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
            compiled = None if abstract else compile_loop(loop, devices, wheels)
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
            made.flops = {kind: n / devices.num_devices for kind, n in flops.items()}
        if abstract:
            made.collectives = tuple(find_traced(loop.step, devices.num_devices))
        if compiled is not None:
            traffic = find_traffic(compiled.text, loop.depth, devices.num_devices)
            made.collectives = traffic.collectives
            made.host_transfers = traffic.host_transfers
            made.step_bytes = traffic.step_bytes
            made.compile_seconds = compiled.seconds
            made.memory = Memory(**compiled.memory, batches_ahead=loop.chunk_bytes)
            made.estimate = estimate_step(
                devices, made.flops, traffic.step_bytes, traffic.of_step()
            )
        return made

    found = make(per_replica_batch)
    if find_batch:
        found.largest_batch = find_largest(
            found.per_replica_batch,
            bool(found.fits),
            lambda size: bool(make(size).fits),
        )
    return found


def find_largest(size: int, is_small: bool, fits: Callable[[int], bool]) -> int:
    """Returns the largest batch that fits, to an eighth; 0 for none."""
    low, high = (size, None) if is_small else (0, size)
    while high is None:
        size = 2 * low
        low, high = (size, None) if fits(size) else (low, size)
    while high - low > max(1, int(low * _FINE_ENOUGH)):
        size = (low + high) // 2
        low, high = (size, high) if fits(size) else (low, size)
    return low
