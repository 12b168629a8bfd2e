"""Measures what processes pay to agree between two loops.

    python -m benchmarks.boundary_cost --json bench.json

Between two loops, all processes of a job exchange one value each, as text, over a tree
of connections; no device takes part. Here they do nothing else, so that what is
measured is that exchange, with all processes on this machine.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.processes import run_job
from benchmarks.report import add_measurement, make_parser

_ROUNDS = 300
_WARM_UP = 20
_DEADLINE_SECONDS = 300


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = make_parser(
        "boundary_cost", "Measures what processes pay to agree between two loops."
    )
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker is not None:
        work(given.worker)
        return
    rows = [measure(count) for count in given.processes]
    table = Table(title="An exchange of all processes", pad_edge=False)
    for name in ("processes", "median", "slowest of 100", "processor time of first"):
        table.add_column(name, justify="right")
    for row in rows:
        times = (row[name] * 1e3 for name in ("median", "slow", "processor"))
        table.add_row(str(row["processes"]), *(f"{each:.2f} ms" for each in times))
    Console().print(table)
    add_measurement(given.json, "boundary_cost", {"rows": rows})


def measure(count: int) -> dict[str, Any]:
    """Returns what process 0 of so many measures, in seconds."""
    with tempfile.TemporaryDirectory(prefix="armillary-bench-") as folder:
        found = Path(folder) / "found.json"
        run_job(
            "benchmarks.boundary_cost",
            ["--worker", str(found)],
            processes=count,
            devices=1,
            timeout_seconds=_DEADLINE_SECONDS,
        )
        return {"processes": count, **json.loads(found.read_text())}


def work(found: Path) -> None:
    """Exchanges values with the others; process 0 writes how long that took.

    Args:
        found: Where to.
    """
    import armillary

    peers = armillary.MultiWorkerMirroredStrategy().peers
    assert peers is not None
    for _ in range(_WARM_UP):
        peers.gather("a benchmark", "ready")
    times: list[float] = []
    processor = time.process_time()
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        peers.gather("a benchmark", "100 steps")
        times.append(time.perf_counter() - start)
    processor = time.process_time() - processor
    if peers.index == 0:
        record = {
            "median": statistics.median(times),
            "slow": statistics.quantiles(times, n=100)[-1],
            "processor": processor / _ROUNDS,
        }
        found.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
