"""Plans a training step for devices that are not there."""

import os
from contextlib import AbstractContextManager
from typing import Any

from armillary._checks import (
    check_instance,
    check_one_of,
    check_path,
    check_positive_int,
)
from armillary._traceback import hides_frames
from armillary.plan._compiler import Compiled, compile_loop, export_loop
from armillary.plan._costs import count_flops, count_step_bytes, find_traced
from armillary.plan._report import Memory, Plan
from armillary.plan._targets import Target, Topology, estimate_step, parse_topology
from armillary.plan._traffic import find_traffic
from armillary.trainer._described import DescribedLoop
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
    if steps_per_loop is not None:
        check_positive_int("steps_per_loop", steps_per_loop)
    fix = 'Use `armillary.plan.find_target("h100")`, or describe one.'
    check_instance("target", target, Target | None, fix)
    if wheels is not None:
        check_path("wheels", wheels)
    if find_batch and abstract:
        raise ValueError(
            "`find_batch` is True, but it compiles to see what fits, and with "
            "`abstract=True` nothing is compiled. Leave one of them out."
        )
    if per_replica_batch is not None:
        check_positive_int("per_replica_batch", per_replica_batch)
    devices = parse_topology(topology, target, abstract=abstract)
    planner = _Planner(trainer, devices, steps_per_loop, wheels)
    if abstract:
        return planner.trace(per_replica_batch)
    found = planner.compile(per_replica_batch)
    if find_batch:
        found.largest_batch = planner.find_batch(found)
    return found


class _Planner:
    """Makes plans of one trainer for one topology."""

    def __init__(
        self,
        trainer: StandardTrainer,
        topology: Topology,
        steps_per_loop: int | None,
        wheels: Any,
    ) -> None:
        self._trainer, self._topology = trainer, topology
        self._steps_per_loop, self._wheels = steps_per_loop, wheels
        target = topology.target
        self._platform = "tpu" if target is None else target.platform

    def _described(self, batch: int | None) -> AbstractContextManager[DescribedLoop]:
        return self._trainer.described(
            self._topology.num_devices,
            self._platform,
            steps_per_loop=self._steps_per_loop,
            per_replica_batch=batch,
        )

    def trace(self, batch: int | None) -> Plan:
        """Returns a plan without a compiler."""
        with self._described(batch) as loop:
            export_loop(loop, self._platform)
            result = self._start(loop)
        count = self._topology.num_devices
        result.collectives = tuple(find_traced(loop.step, count))
        return result

    def compile(self, batch: int | None) -> Plan:
        """Returns a plan of what the compiler makes."""
        with self._described(batch) as loop:
            compiled = compile_loop(loop, self._topology, self._wheels)
            result = self._start(loop)
        if compiled is not None:
            self._finish(result, loop, compiled)
        result.is_abstract = False
        return result

    def _start(self, loop: DescribedLoop) -> Plan:
        count = self._topology.num_devices
        plan = Plan(
            topology=self._topology,
            mesh=dict(loop.mesh.shape),
            per_replica_batch=loop.share_size,
            global_batch=loop.share_size * loop.num_shares,
            steps_per_program=loop.capacity,
            state_bytes=loop.state_bytes,
            held_bytes=loop.held_bytes,
            flops=count_flops(loop.step),
            accumulate_steps=loop.num_parts,
        )
        if plan.is_divided:
            plan.flops = {dtype: n / count for dtype, n in plan.flops.items()}
        return plan

    def _finish(self, result: Plan, loop: DescribedLoop, compiled: Compiled) -> None:
        count = self._topology.num_devices
        traffic = find_traffic(compiled.module, loop.depth, count)
        result.collectives = traffic.collectives
        result.host_transfers = traffic.host_transfers
        result.step_bytes = count_step_bytes(compiled.module, loop.depth)
        result.compile_seconds = compiled.seconds
        result.memory = Memory(**compiled.memory, batches_ahead=loop.chunk_bytes)
        result.estimate = estimate_step(
            self._topology, result.flops, result.step_bytes, traffic.of_step()
        )

    def find_batch(self, first: Plan) -> int:
        """Returns the largest batch that fits, to an eighth; 0 for none."""
        fits, size = first.fits, first.per_replica_batch
        low, high = (size, None) if fits else (0, size)
        while high is None:
            size = 2 * low
            low, high = (size, None) if self.compile(size).fits else (low, size)
        while high - low > max(1, int(low * _FINE_ENOUGH)):
            size = (low + high) // 2
            low, high = (size, high) if self.compile(size).fits else (low, size)
        return low
