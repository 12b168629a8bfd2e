"""Plans one step for more and more devices: what grows with their number.

    python -m benchmarks.scaling --json scaling.json
    python -m benchmarks.scaling --task bert-base --dtype bf16 \
        --topologies h100:1x1 h100:1x4

Each row runs in a separate process, so its memory belongs to one plan. Compilers are
found as `armillary plan` finds them (`docs/devices/plan.md`). For a bare number of
devices the step is traced and lowered only.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.processes import ask_module
from benchmarks.protocol import DTYPES, SIZES, Options
from benchmarks.report import add_measurement, make_parser
from benchmarks.tasks import TASKS, make_task

# 4, 16, 64, 256 and 512 chips, and GPUs; then that many virtual CPU devices.
_TOPOLOGIES = (
    *("v5p:2x2x1", "v5p:2x2x4", "v5p:4x4x4", "v5p:4x8x8", "v5p:8x8x8"),
    *("h100:1x4", "h100:2x8", "h100:8x8", "h100:32x8", "h100:64x8"),
    *("4", "16", "64", "256", "512"),
)
_STEPS_PER_LOOP = 100
_DEADLINE_SECONDS = 1800


def main(arguments: Sequence[str] | None = None) -> None:
    """Plans and prints."""
    parser = make_parser("scaling", "Plans one step for more and more devices.")
    parser.add_argument("--task", choices=TASKS, default="mlp")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--topologies", nargs="+", default=_TOPOLOGIES)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one is not None:
        record = plan_once(given.task, given.size, given.dtype, given.one)
        sys.stdout.write(json.dumps(record))
        return
    what = ("--task", given.task, "--size", given.size, "--dtype", given.dtype)
    rows = [
        ask_module(
            "benchmarks.scaling",
            *("--one", topology, *what),
            timeout_seconds=_DEADLINE_SECONDS,
        )
        for topology in given.topologies
    ]
    Console(width=120).print(make_table(given.task, rows))
    add_measurement(given.json, "scaling", {"task": given.task, "rows": rows})


def plan_once(task: str, size: str, dtype: str, topology: str) -> dict[str, Any]:
    """Returns what a plan says, and what it took.

    Args:
        task: Name of the task.
        size: Its size.
        dtype: The dtype of the computation.
        topology: The devices, or a number of them.
    """
    import jax
    from flax import nnx

    import armillary
    from armillary.plan import Plan, plan
    from benchmarks.contestants.controller import Trainer, make_dataset
    from benchmarks.contestants.functional import DTYPES as JAX_DTYPES
    from benchmarks.contestants.functional import SEED, make_optimizer
    from benchmarks.models import make_model

    made = make_task(task, size)
    options = Options(steps_per_loop=_STEPS_PER_LOOP, dtype=dtype)
    strategy = armillary.MirroredStrategy(jax.devices()[:1])
    model = make_model(made, nnx.Rngs(SEED), JAX_DTYPES[dtype])
    optimizer = nnx.Optimizer(model, make_optimizer(made), wrt=nnx.Param)
    dataset = make_dataset(made, options, strategy)
    trainer = Trainer(dataset, strategy, model, optimizer)

    def make_plan(*, abstract: bool) -> Plan:
        steps = _STEPS_PER_LOOP
        return plan(trainer, topology, steps_per_loop=steps, abstract=abstract)

    start = time.perf_counter()
    found = make_plan(abstract=True)
    traced_seconds = time.perf_counter() - start
    # The peak of this process, before another one compiles.
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if not topology.isdecimal():
        found = make_plan(abstract=False)
    return {
        **json.loads(found.as_json()),
        "trace_seconds": traced_seconds,
        "peak_bytes": peak_bytes,
    }


def make_table(task: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Returns the table of plans.

    Args:
        task: The planned task.
        rows: The results of `plan_once`.
    """
    table = Table(title=f"One step of {task}, planned", pad_edge=False)
    table.add_column("devices")
    for name in (
        "replicas",
        "traced in",
        "host memory",
        "compiled in",
        "on each device",
        "all-reduce a step",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        reduced = [
            each
            for each in row["collectives"]
            if each["kind"] == "all-reduce" and each["scope"] == "step"
        ]
        size = sum(each["num_bytes"] * each["times"] for each in reduced)
        memory, seconds = row["memory"], row["compile_seconds"]
        table.add_row(
            row["topology"],
            str(row["num_replicas"]),
            f"{row['trace_seconds']:.1f} s",
            f"{row['peak_bytes'] / 1e6:.0f} MB",
            "" if seconds is None else f"{seconds:.1f} s",
            "" if memory is None else f"{memory['total'] / 1e6:.1f} MB",
            f"{size / 1e6:.3f} MB in {sum(each['times'] for each in reduced)}",
        )
    return table


if __name__ == "__main__":
    main()
