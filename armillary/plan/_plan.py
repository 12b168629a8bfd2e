"""Plans a training step for devices that are not there."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from armillary._checks import check_instance, check_one_of, check_positive_int
from armillary._planned import planning
from armillary._traceback import hides_frames
from armillary.errors import ArmillaryError
from armillary.plan._compiler import compile_loop, export_loop
from armillary.plan._costs import find_traced
from armillary.plan._peak import find_peak
from armillary.plan._record import Memory, Plan, Variant
from armillary.plan._targets import Target, Topology, parse_topology
from armillary.plan._traffic import find_traffic
from armillary.trainer._described import DescribedLoop, described
from armillary.trainer._options import StandardTrainerOptions
from armillary.trainer._standard_trainer import StandardTrainer
from armillary.xla._flops import count_flops

_FINE_ENOUGH = 1 / 8  # of the largest batch


@hides_frames
def plan(
    trainer: StandardTrainer | Callable[[], Any],
    topology: str | int,
    *,
    steps_per_loop: int | None = None,
    per_replica_batch: int | None = None,
    find_batch: bool = False,
    target: Target | None = None,
    abstract: bool = False,
    variants: Sequence[Mapping[str, Any]] = (),
) -> Plan:
    """Compiles the loop of a trainer for devices that are not there.

    The same code makes the program as for a run: many steps, with the state donated.
    The trainer does not change, and no device is used. Each replica keeps the batch
    that it has now, so the global batch grows with the devices. Under
    `ShardedStrategy`, each part of a batch keeps its size in the same way: see
    `ShardedStrategy.described`.

    Only the shapes of the state matter, so a `jax.ShapeDtypeStruct` counts as an array.
    A function makes the trainer for the plan alone: in it, `strategy.make` makes shapes
    and no arrays, so any model can be planned on any machine::

        def make_trainer():
            strategy = armillary.ShardedStrategy({"data": 2, "fsdp": 4})
            model, optimizer = strategy.make(make_state)
            return Trainer(strategy, model, optimizer)

        print(armillary.plan.plan(make_trainer, "v5p:4x4x4"))

    Args:
        trainer: The trainer, under a `MirroredStrategy` or a `ShardedStrategy`; or a
            function without arguments that makes the trainer or the `Controller`.
        topology: A TPU slice such as `"v5e:16x16"`, several slices such as
            `"4xv5e:16x16"`, hosts by GPUs such as `"h100:8x8"`, or virtual CPU devices
            such as `"cpu:64"`. An abstract plan takes a number of devices too.
        steps_per_loop: As for the `Controller`. `None` uses the number of the last
            loop.
        per_replica_batch: Examples of each replica, or part of a batch, instead of the
            current number.
        find_batch: True to find the largest batch that fits, to an eighth. The loop is
            compiled for several batches, one after the other.
        target: The kind of device, if its name is not known.
        abstract: True to compile nothing. Then no compiler is needed, and the plan has
            no memory.
        variants: Options of the trainer to compare, such as
            `[{"accumulate_steps": 4}]`. The loop is compiled again for each dictionary
            of fields of `StandardTrainerOptions`.

    Raises:
        TypeError: If `trainer` is not a `StandardTrainer`, and makes none.
        ValueError: If `topology` describes no devices, its slices or hosts are not the
            groups of the strategy's `dcn`, or the strategy is for one device. Also if
            `find_batch` or `variants` is combined with `abstract`, if `find_batch` is
            set for devices whose memory is not known, if a batch is chosen for a
            trainer without data, or if `variants` has an unknown option.
        PlanError: If there is no compiler for the devices, or it fails.
    """
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
    _check_variants(variants, abstract=abstract)
    devices = parse_topology(topology, target, abstract=abstract)
    if find_batch:
        _check_memory_is_known(devices)
    with planning():
        planned, of_controller = _find_trainer(trainer)
        steps_per_loop = steps_per_loop or of_controller
        if planned.train_dataset is None and (find_batch or per_replica_batch):
            name = "find_batch" if find_batch else "per_replica_batch"
            value = True if find_batch else per_replica_batch
            raise ValueError(
                f"`{name}` is {value}, but `train_dataset` of the trainer is None: its "
                "steps make their own data and take no batch. Leave it out."
            )

        def make(batch: int | None, options: Mapping[str, Any]) -> Plan:
            with described(
                planned,
                devices.num_devices,
                "tpu" if devices.target is None else devices.target.platform,
                steps_per_loop=steps_per_loop,
                per_replica_batch=batch,
                options=options,
            ) as loop:
                _check_groups(loop, devices)
                return _make(loop, devices, abstract=abstract)

        def make_variant(options: Mapping[str, Any]) -> Plan:
            return make(per_replica_batch, options)

        def fits(batch: int) -> bool:
            return bool(make(batch, {}).fits)

        found = make(per_replica_batch, {})
        compared = [_compare(options, make_variant) for options in variants]
        found.variants = tuple(compared)
        if find_batch:
            fits_now = bool(found.fits)
            found.largest_batch = find_largest(
                found.per_replica_batch, fits_now, fits, unit=found.accumulate_steps
            )
    return found


def _check_memory_is_known(devices: Topology) -> None:
    """Raises if nothing says how much memory a device has, so every batch would fit."""
    target = devices.target
    if target is None or target.memory_bytes is None:
        raise ValueError(
            f"`find_batch` is True, but the memory of a device of {devices.text!r} is "
            "not known, so no batch is too large. Plan for devices such as "
            '`"h100:1x8"`, or describe the memory: `target=armillary.plan.Target('
            'name="mine", platform="cpu", memory_bytes=64e9)`.'
        )


def _find_trainer(trainer: Any) -> tuple[StandardTrainer, int | None]:
    """Returns a trainer, and the steps in a loop if there is a controller.

    The trainer is made now if a function makes it.
    """
    made: Any = trainer
    if not isinstance(trainer, StandardTrainer) and callable(trainer):
        made = trainer()
    found: Any = getattr(made, "trainer", made)
    fix = "Derive from `armillary.StandardTrainer`, whose loop is planned."
    check_instance("trainer", found, StandardTrainer, fix)
    return found, None if found is made else made.steps_per_loop


def _check_variants(variants: Sequence[Mapping[str, Any]], *, abstract: bool) -> None:
    """Raises if `variants` is not a list of options of a trainer."""
    fix = 'Write `variants=[{"accumulate_steps": 4}]`.'
    is_list = isinstance(variants, Sequence) and not isinstance(variants, str | bytes)
    check_instance("variants", variants if is_list else None, Sequence, fix)
    if variants and abstract:
        raise ValueError(
            f"`variants` has {len(variants)} entries, which are compiled to be "
            "compared, but with `abstract=True` nothing is compiled. Leave one of "
            "them out."
        )
    fields = dataclasses.fields(StandardTrainerOptions)
    known = [each.name for each in fields]
    for options in variants:
        check_instance("variants", options, Mapping, fix)
        unknown = [name for name in options if name not in known]
        if unknown:
            raise ValueError(
                f"`variants` has {unknown[0]!r}, which is not an option of a trainer. "
                f"Use some of {known}."
            )


def _check_groups(loop: DescribedLoop, devices: Topology) -> None:
    """Raises if the devices are not in the groups that the strategy's `dcn` names."""
    wanted = math.prod(loop.dcn.values())
    count = devices.num_groups
    if not loop.dcn or count is None or count == wanted:
        return
    noun = "slices" if devices.num_slices > 1 else "hosts"
    raise ValueError(
        f"`dcn` of the strategy is {dict(loop.dcn)}, for {wanted} groups of devices "
        f"with slow links between them, but {devices.text!r} has {count} {noun}. "
        f"Choose sizes whose product is {count}, or plan for other devices."
    )


def _make(loop: DescribedLoop, devices: Topology, *, abstract: bool) -> Plan:
    """Returns the plan of a loop, compiled unless it is to be abstract."""
    platform = "tpu" if devices.target is None else devices.target.platform
    if abstract:
        export_loop(loop, platform)
    compiled = None if abstract else compile_loop(loop, devices)
    flops = count_flops(loop.step)
    sizes = dict(loop.mesh.shape)
    found = Plan(
        topology=devices,
        mesh=sizes,
        per_replica_batch=loop.share_size,
        global_batch=loop.share_size * loop.num_shares,
        steps_per_program=loop.capacity,
        state_bytes=loop.state_bytes,
        held_bytes=loop.held_bytes,
        flops=flops,
        # A mesh of one axis may be of a `MirroredStrategy` or of a `ShardedStrategy`.
        is_divided=loop.split is not None,
        is_abstract=abstract,
        accumulate_steps=loop.num_parts,
        num_groups=math.prod(loop.dcn.values()),
    )
    if found.is_divided:
        # The traced program is the step of all devices together.
        found.flops = {kind: n / devices.num_devices for kind, n in flops.items()}
    if abstract:
        found.collectives = tuple(find_traced(loop.step, sizes, loop.dcn))
    if compiled is not None:
        islands = compiled.islands
        found.num_groups = len(set(islands)) or 1
        traffic = find_traffic(compiled.text, loop.depth, devices.num_devices, islands)
        found.collectives = traffic.collectives
        found.host_transfers = traffic.host_transfers
        found.compile_seconds = compiled.seconds
        found.memory = Memory(**compiled.memory, batches_ahead=loop.chunk_bytes)
        found.peak = find_peak(compiled.report, compiled.text)
    return found


def _compare(
    options: Mapping[str, Any], make: Callable[[Mapping[str, Any]], Plan]
) -> Variant:
    """Returns a variant of a plan, compiled; or the reason why there is none."""
    try:
        return Variant(dict(options), make(options).memory)
    except (ArmillaryError, TypeError, ValueError) as error:
        return Variant(dict(options), None, str(error))


def find_largest(
    size: int, is_small: bool, fits: Callable[[int], bool], *, unit: int = 1
) -> int:
    """Returns the largest batch that fits, to an eighth; 0 for none.

    Args:
        size: The batch to begin with.
        is_small: True if this batch fits.
        fits: Returns whether another batch fits.
        unit: The batches to try are multiples of it. A step that takes its batch in
            parts cannot take a batch that does not divide into them.
    """
    # The largest batch that is known to fit, and the smallest that does not, in units.
    low = 0
    high = math.ceil(size / unit)
    if is_small:
        low = size // unit
        high = 2 * high
        while fits(high * unit):
            low = high
            high = 2 * high
    while high - low > max(1, int(low * _FINE_ENOUGH)):
        middle = (low + high) // 2
        if fits(middle * unit):
            low = middle
        else:
            high = middle
    # Under a `ShardedStrategy`, the first batch may be smaller than a unit.
    return max(low * unit, size if is_small else 0)
