"""Traces a training loop from types, for devices that this machine does not have."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from armillary.data._dataset import DistributedDataset
from armillary.data._layout import BatchLayout, first_replicas
from armillary.data.feed._chunks import Chunk, ChunkBuilder
from armillary.data.feed._gather import Gather
from armillary.data.feed._split import count_rows
from armillary.distribute._global_arrays import PINNED_HOST, everywhere
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.strategies._layouts import SingleLayout
from armillary.trainer._datasets import distribute, flatten_datasets
from armillary.trainer._loop import FEW_STEPS, choose_chunk_size
from armillary.trainer._options import LoopOptions
from armillary.trainer._program import Program
from armillary.trainer._returned_metrics import with_room_for_metrics
from armillary.trainer._setup import Setup
from armillary.trainer._standard_trainer import StandardTrainer
from armillary.trainer._step_guard import Health
from armillary.trainer._step_method import StepMethod
from armillary.trainer._tracer import StepPrograms
from armillary.typing import PyTree
from armillary.xla._lowerings import Split


class DescribedLoop(NamedTuple):
    """The program of a loop, to be lowered under `partitioned(split)`."""

    fn: Any  # from `Program.abstract_call`
    types: tuple[list[Any], list[Any]]  # of its arguments, with shardings over `mesh`
    mesh: AbstractMesh
    dcn: Mapping[str, int]  # groups of devices along the axes with slow links
    step: Any  # one of its steps, as a traced program
    depth: int  # number of nested loops around a step in the program
    capacity: int  # number of steps that fit into a chunk
    num_shares: int  # number of parts of a batch, one for each replica
    share_size: int  # examples in a share of the first dataset, or 0 without data
    num_parts: int  # `accumulate_steps`
    chunk_bytes: int  # bytes of batches on each device
    state_bytes: int
    held_bytes: int  # bytes of the state on each device
    compiler_options: dict[str, Any]
    split: Split | None


@contextmanager
def described(
    trainer: StandardTrainer,
    num_devices: int,
    platform: str,
    *,
    steps_per_loop: int | None = None,
    per_replica_batch: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Iterator[DescribedLoop]:
    """Traces the loop of a trainer for other devices, to be lowered.

    `options` has fields of the trainer's options that are different for this loop.
    """
    if trainer._has_own_train():
        raise ValueError(
            f"{type(trainer).__name__} overrides `train`, so it has no loop of this "
            "library that could be planned. Write its step as `train_step`."
        )
    setup = trainer._get_train()
    with trainer._in_strategy() as strategy, _with_options(setup, options or {}):
        method = trainer._get_method(setup, strategy, "train_step")
        method_options = method.options
        num_steps = steps_per_loop or setup.steps_per_loop or FEW_STEPS
        size = method_options.steps_per_chunk or choose_chunk_size(num_steps)
        leaves, structure = flatten_datasets(setup.datasets)
        datasets = [distribute(data, strategy) for data in leaves]
        # A share has the size that it has on the devices that are present.
        num_shares = strategy.layout.num_shares
        shares = [_share(data, num_shares, per_replica_batch) for data in datasets]

        with strategy.described(num_devices, platform) as mesh:
            layout = strategy.layout  # for the other devices
            gathers: list[Gather] = []
            for dataset in datasets:
                gathers.append(replace(dataset.input.gather, layout=layout))

            def trace() -> tuple[FlatState, Chunk, Program]:
                programs = StepPrograms(method, gathers, structure)
                programs.find_hooks()
                flat = programs.find_state()
                programs.loops_per_chunk = size // num_steps
                chunk = _describe_chunk(
                    programs, gathers, shares, layout, method_options, size, mesh
                )
                return flat, chunk, programs.get(chunk)

            flat, chunk, program = with_room_for_metrics(trace)
            share_size = count_rows(shares[0]) if shares else 0
            yield _describe_loop(method, flat, chunk, program, share_size, mesh)


def _describe_loop(
    method: StepMethod,
    flat: FlatState,
    chunk: Chunk,
    program: Program,
    share_size: int,
    mesh: AbstractMesh,
) -> DescribedLoop:
    """Returns the program of a full chunk, with the figures of its memory."""
    options = method.options
    health = None
    if options.on_non_finite is not None:
        health = Health.start(len(flat.state.paths))
        health = SingleLayout(everywhere(mesh)).placed_types(health)

    fn, types = program.abstract_call(chunk.inputs, health)
    return DescribedLoop(
        fn=fn,
        types=types,
        mesh=mesh,
        dcn=method.strategy.placement.dcn,
        step=program.step.program,
        depth=program.depth,
        capacity=chunk.capacity,
        num_shares=method.strategy.layout.num_shares,
        share_size=share_size,
        num_parts=options.accumulate_steps,
        chunk_bytes=_count_held(chunk.arrays),
        state_bytes=sum(aval.size * aval.dtype.itemsize for aval in flat.types),
        held_bytes=_count_held(flat.types_to_take(())),
        compiler_options=dict(options.compiler_options or {}),
        split=flat.split,
    )


@contextmanager
def _with_options(setup: Setup, changes: Mapping[str, Any]) -> Iterator[None]:
    """Gives a trainer other options for a while."""
    before = setup.options
    setup.options = replace(before, **changes)
    try:
        yield
    finally:
        setup.options = before


def _share(dataset: DistributedDataset, num_shares: int, size: int | None) -> PyTree:
    """Returns the types of one share of a batch."""
    spec = dataset.element_spec
    num_rows = size or max(count_rows(spec) // num_shares, 1)

    def type_of_share(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows, *leaf.shape[1:]), leaf.dtype)

    return jax.tree.map(type_of_share, spec)


def _describe_chunk(
    programs: StepPrograms,
    gathers: list[Gather],
    shares: list[PyTree],
    layout: BatchLayout,
    options: LoopOptions,
    most_steps: int,
    mesh: AbstractMesh,
) -> Chunk:
    """Returns a full chunk, with types of arrays in place of arrays."""
    types = [layout.placed_types(share) for share in shares]
    num_datasets = len(types)
    active = (first_replicas(layout.num_replicas),) * num_datasets
    per_step = programs.count_batches(types, active)
    builder = ChunkBuilder(
        per_step,
        steps_per_chunk=most_steps,
        max_chunk_bytes=options.max_chunk_bytes,
    )

    sent: list[PyTree] = []
    resident: list[PyTree] = []
    everywhere_on_mesh = SingleLayout(everywhere(mesh))
    for gather, share in zip(gathers, shares, strict=True):
        batch, held = gather.sent_types(share)
        sent.append(batch)
        resident.append(everywhere_on_mesh.placed_types(held))

    capacity = builder.count_steps([layout.placed_types(batch) for batch in sent])
    arrays: list[PyTree] = []
    for batch, num_batches in zip(sent, per_step, strict=True):
        stack_size = capacity * num_batches
        arrays.append(layout.placed_types(batch, (stack_size,)))

    return Chunk(
        arrays=arrays,
        resident=resident,
        types=types,
        num_steps=capacity,
        capacity=capacity,
        signature=None,
        active=active,
        num_replicas=(layout.num_replicas,) * num_datasets,
    )


def _count_held(types: PyTree) -> int:
    """Returns the bytes that each device holds of arrays with shardings."""
    num_bytes = 0
    for leaf in jax.tree.leaves(types):
        is_on_device = leaf.sharding.memory_kind != PINNED_HOST
        if is_on_device:
            shape = leaf.sharding.shard_shape(leaf.shape)
            num_bytes += math.prod(shape) * leaf.dtype.itemsize
    return num_bytes
