"""Counts what the devices of a training step send each other, on virtual CPU devices.

What is counted are *rounds*: the CPU's compiler makes a collective for each array, but
those that need nothing of each other are one round, which compilers for TPUs and GPUs
combine into one operation. A step that sums its gradients once has one round of
all-reduces, however many parameters there are. One that first sums statistics, and then
what it computes from them, has two.
"""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from armillary._checks import (
    check_instance,
    check_not_negative_int,
    check_positive_int,
    list_lines,
)
from armillary.plan._compile_worker import compile_exported
from armillary.plan._compiler import export_loop
from armillary.plan._costs import Collective, count_rounds
from armillary.plan._traffic import find_traffic, parse_module
from armillary.trainer._standard_trainer import StandardTrainer

_PLATFORM = "cpu"


def assert_collectives(
    trainer: StandardTrainer,
    *,
    all_reduce: int = 1,
    all_gather: int = 0,
    reduce_scatter: int = 0,
    all_to_all: int = 0,
    collective_permute: int = 0,
    max_bytes: int | None = None,
    num_replicas: int | None = None,
) -> None:
    """Checks how many collectives one step of a trainer compiles to.

    The step is compiled and not run; the trainer and its data stay as they are.

    Args:
        trainer: The trainer, under a `MirroredStrategy`.
        all_reduce: Rounds of all-reduces: how many must follow each other. The default
            is a step that sums its gradients once.
        all_gather: The same of all-gathers, and so on.
        reduce_scatter: Of reduce-scatters.
        all_to_all: Of all-to-all exchanges.
        collective_permute: Of permutes.
        max_bytes: Most bytes over all collectives of a step: of operands on each
            device, for all-gathers of the result. Gradients have as many bytes as the
            parameters.
        num_replicas: How many replicas to compile for. `None` takes all CPU devices of
            this process.

    Raises:
        AssertionError: If a number is another one, or there are more bytes.
        ValueError: If there are fewer than two CPU devices, or the strategy is for one.
    """
    expected = {
        "all-reduce": all_reduce,
        "all-gather": all_gather,
        "reduce-scatter": reduce_scatter,
        "all-to-all": all_to_all,
        "collective-permute": collective_permute,
    }
    for kind, wanted in expected.items():
        check_not_negative_int(kind.replace("-", "_"), wanted)
    if max_bytes is not None:
        check_not_negative_int("max_bytes", max_bytes)
    found = find_collectives(trainer, num_replicas)
    shown = list_lines(
        f"round {each.round}: {each.kind} of {each.num_bytes} bytes"
        + (f", {each.times} times" if each.times > 1 else "")
        for each in sorted(found, key=lambda each: each.round)
    )
    for kind, wanted in expected.items():
        count = count_rounds(found, kind)
        if count != wanted:
            raise AssertionError(
                f"A step of {type(trainer).__name__} has {count} rounds of {kind}, and "
                f"`{kind.replace('-', '_')}` is {wanted}. Its collectives are:"
                f"\n{shown or '  none'}"
            )
    total = sum(each.times * each.num_bytes for each in found)
    if max_bytes is not None and total > max_bytes:
        raise AssertionError(
            f"The collectives of a step of {type(trainer).__name__} have {total} bytes "
            f"on each device, and `max_bytes` is {max_bytes}:\n{shown}"
        )


def find_collectives(
    trainer: StandardTrainer, num_replicas: int | None = None
) -> list[Collective]:
    """Returns the collectives that run in every step of a trainer, on CPU devices.

    Args:
        trainer: As for `assert_collectives`, like `num_replicas`.
        num_replicas: How many replicas to compile for.

    Raises:
        ValueError: If there are fewer than two CPU devices, or the strategy is for one.
    """
    fix = "Derive it from `armillary.StandardTrainer`."
    check_instance("trainer", trainer, StandardTrainer, fix)
    devices = jax.local_devices(backend=_PLATFORM)
    count = len(devices)
    if num_replicas is not None:
        count = check_positive_int("num_replicas", num_replicas)
    if not 2 <= count <= len(devices):
        raise ValueError(
            f"`num_replicas` is {num_replicas!r}, and this process has {len(devices)} "
            "CPU devices. It takes two replicas to send anything, and a device for "
            'each: begin the tests with `jax.config.update("jax_num_cpu_devices", 8)`.'
        )
    with trainer.described(count, _PLATFORM) as loop:
        program = export_loop(loop, _PLATFORM)
    axis_types = (AxisType.Auto,) * len(loop.mesh.axis_names)
    shape = np.asarray(devices[:count]).reshape(loop.mesh.axis_sizes)
    mesh = Mesh(shape, loop.mesh.axis_names, axis_types=axis_types)
    compiled = compile_exported(program, mesh, _PLATFORM, loop.compiler_options)
    module = parse_module(compiled.as_text())
    return find_traffic(module, loop.depth, count).of_step()
