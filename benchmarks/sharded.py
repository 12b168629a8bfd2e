"""Compares a step that devices share (FSDP) with `jax.jit` and `NamedSharding` by hand.

    python -m benchmarks.sharded --rounds 9 --json bench.json

The two loops take turns, each in a process of its own with 8 virtual CPU devices. The
table has their speeds, the ratio of each pair, and the highest memory of each process.
"""

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Bench, Settings
from benchmarks.processes import WorkerProcess
from benchmarks.protocol import SIZES, write_message
from benchmarks.ratios import pair_ratios
from benchmarks.report import add_measurement, make_parser
from benchmarks.worker import find_versions, replying, serve

NAMES = ("by-hand", "armillary")
_NUM_DEVICES = 8
_DEVICES_FLAG = "--xla_force_host_platform_device_count"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = make_parser(
        "sharded", "Compares a step that devices share with one written by hand."
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="steps of a burst")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker is not None:
        work(given.worker, given.size)
        return
    settings = Settings(
        rounds=given.rounds, burst_steps=given.steps, lead_in_steps=given.steps
    )
    measurement = measure(given.size, settings)
    Console().print(make_table(measurement))
    add_measurement(given.json, "sharded", measurement)


def work(name: str, size: str) -> None:
    """Runs one of the two loops for the parent."""
    with replying() as replies:
        from benchmarks.contestants import sharded

        contestant = sharded.CONTESTANTS[name](sharded.SIZES[size])
        contestant.run(1)  # This compiles everything.
        ready = {
            "event": "ready",
            "versions": find_versions(),
            "setup_seconds": 0.0,
            "facts": {},
        }
        write_message(replies, ready)
        serve(contestant, sys.stdin, replies)


def start_worker(name: str, size: str) -> WorkerProcess:
    """Starts the process of one of the two loops."""
    command = [sys.executable, "-m", "benchmarks.sharded", "--worker", name]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES_FLAG}={_NUM_DEVICES}"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    return WorkerProcess(name, [*command, "--size", size], environment)


def measure(
    size: str,
    settings: Settings,
    start: Callable[[str, str], WorkerProcess] = start_worker,
) -> dict[str, Any]:
    """Returns the speeds, the ratio and the memory of the two loops.

    Args:
        size: The size of the model.
        settings: The length of the measurement.
        start: Starts a worker, in the place of `start_worker` for tests.
    """
    with ExitStack() as stack:
        bench = Bench(settings)
        workers = {name: stack.enter_context(start(name, size)) for name in NAMES}
        for name, worker in workers.items():
            bench.add(name, worker)
        burst = bench.calibrate(1)
        for number in range(settings.rounds):
            bench.run_round(number, dict.fromkeys(bench.records, burst))
        missing = {**bench.skipped, **bench.failed}
        if missing:
            raise RuntimeError(f"Loops that have failed: {missing}")
        peaks = {name: read_peak_bytes(worker) for name, worker in workers.items()}

    by_hand, ours = (bench.records[name] for name in NAMES)
    medians = {
        name: burst / statistics.median(record["seconds"])
        for name, record in bench.records.items()
    }
    ratio = pair_ratios(by_hand["seconds"], ours["seconds"])
    return {
        "size": size,
        "burst_steps": burst,
        "steps_per_second": medians,
        "ratio": dataclasses.asdict(ratio),
        "losses": {name: record["losses"] for name, record in bench.records.items()},
        "peak_bytes": peaks,
        "peak_ratio": peaks["armillary"] / peaks["by-hand"],
    }


def read_peak_bytes(worker: WorkerProcess) -> int:
    """Returns the most memory that a process has used."""
    lines = Path(f"/proc/{worker.pid}/status").read_text().splitlines()
    (peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return 1024 * int(peak)


def make_table(measurement: dict[str, Any]) -> Table:
    """Returns the table of a measurement."""
    table = Table(title="A step that 8 devices share", pad_edge=False)
    for title in ("loop", "steps/s", "ratio", "peak memory"):
        table.add_column(title, justify="left" if title == "loop" else "right")
    ratio = measurement["ratio"]
    shown = f"{ratio['median']:.3f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    for name in NAMES:
        table.add_row(
            name,
            f"{measurement['steps_per_second'][name]:.2f}",
            shown if name == "armillary" else "",
            f"{measurement['peak_bytes'][name] / 1e6:,.0f} MB",
        )
    return table


if __name__ == "__main__":
    main()
