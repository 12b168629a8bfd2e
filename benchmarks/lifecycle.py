"""Measures the first step, the memory, a save and a restore of each contestant.

    python -m benchmarks.lifecycle --tasks mlp gpt --contestants armillary tunix

Each contestant runs in two processes, one after the other. They share a persistent
compilation cache that is empty at first, so the first step is cold in the first process
and warm in the second one. The first process trains some steps, saves, and trains a few
more. The second process restores, and trains the same few steps again. The losses of
the first steps are compared with the scan by hand, and the losses after the restore
with the losses of the first process.

A contestant takes part if it has `save(folder)` and `restore(folder)`. Both return when
they are complete, and the second also moves the data to the position of the save.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contestants import CONTESTANTS, make_contestant
from benchmarks.environments import find_pythons
from benchmarks.processes import REPOSITORY
from benchmarks.protocol import SIZES, Options, UnsupportedError
from benchmarks.report import add_measurement, make_parser
from benchmarks.tasks import TASKS, make_task
from benchmarks.worker import find_versions

LOSS_TOLERANCE = 1e-3
"""The largest relative difference between losses that count as the same."""

_BY_HAND = "reference-scan"
_NUM_STEPS = 10
_NUM_STEPS_AFTER = 3
_DEADLINE_SECONDS = 600
_CACHE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints.

    Raises:
        SystemExit: If a contestant failed, or reached other losses.
    """
    parser = make_parser("lifecycle", "Measures first steps, memory and saves.")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["mlp", "gpt"])
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument(
        "--contestants", nargs="+", choices=CONTESTANTS, default=["armillary"]
    )
    parser.add_argument("--peer-python", nargs="+", default=[], metavar="NAME=PATH")
    parser.add_argument(
        "--environments", type=Path, default=REPOSITORY, metavar="FOLDER"
    )
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--since", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.work is not None:
        _work(given)
        return

    pythons = find_pythons(given.peer_python, given.environments)
    found = {
        task: measure(task, given.size, given.contestants, pythons)
        for task in given.tasks
    }
    add_measurement(given.json, "lifecycle", found)
    Console(width=130).print(make_table(found))
    problems = list_problems(found)
    for line in problems:
        Console().print(line, markup=False, soft_wrap=True)
    if problems:
        raise SystemExit(1)


def measure(
    task: str, size: str, names: Sequence[str], pythons: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Returns the records of the contestants, by name.

    Args:
        task: Name of the task.
        size: Its size.
        names: The contestants. The scan by hand is added, for its losses.
        pythons: Interpreters of contestants that need another one than this.
    """
    records = {}
    for name in dict.fromkeys([_BY_HAND, *names]):
        python = pythons.get(name, sys.executable)
        records[name] = _measure_one(name, task, size, python)
    return records


def _measure_one(name: str, task: str, size: str, python: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="armillary-bench-") as folder:
        cold = _start(python, name, task, size, folder)
        if "problem" in cold:
            return cold
        warm = _start(python, name, task, size, folder)
        if "problem" in warm:
            return warm
    return {"cold": cold, "warm": warm}


def _start(python: str, name: str, task: str, size: str, folder: str) -> dict[str, Any]:
    """Runs one process of a contestant, and returns the record that it writes."""
    path = Path(folder, "record.json")
    path.unlink(missing_ok=True)
    command = [
        *(python, "-m", "benchmarks.lifecycle", "--tasks", task, "--size", size),
        *("--work", name, folder, str(path), "--since", repr(time.time())),
    ]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(Path(folder, "programs")), **_CACHE}
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            check=False,
            cwd=REPOSITORY,
            env={**os.environ, **cache},
            text=True,
            timeout=_DEADLINE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"It did not end within {_DEADLINE_SECONDS} s."}
    if ended.returncode or not path.exists():
        last = ended.stderr.strip().splitlines()[-1:] or ["no message"]
        return {"problem": f"It ended with {ended.returncode}: {last[0]}"}
    return json.loads(path.read_text())


def _work(given: argparse.Namespace) -> None:
    """Writes the record of this process."""
    name, folder, path = given.work
    try:
        record = run_once(name, given.tasks[0], given.size, folder, given.since)
    except UnsupportedError as error:
        record = {"problem": str(error)}
    Path(path).write_text(json.dumps(record))


def run_once(
    name: str, task: str, size: str, folder: str, since: float
) -> dict[str, Any]:
    """Runs one process: the first one of a folder saves, and the second one restores.

    Args:
        name: The contestant.
        task: Name of the task.
        size: Its size.
        folder: Where the checkpoint is.
        since: When the process was started, in seconds as `time.time` counts them.
    """
    contestant: Any = make_contestant(name)
    contestant.setup(make_task(task, size), Options(steps_per_loop=1))
    checkpoint = Path(folder, "checkpoint")
    record: dict[str, Any] = {}
    is_restored = checkpoint.exists()
    restore_seconds = 0.0
    if is_restored:
        start = time.perf_counter()
        contestant.restore(str(checkpoint))
        record["restore_seconds"] = restore_seconds = time.perf_counter() - start

    losses = [contestant.run(1)]
    record["first_step_seconds"] = time.time() - since - restore_seconds
    more = (_NUM_STEPS_AFTER if is_restored else _NUM_STEPS) - 1
    losses += [contestant.run(1) for _ in range(more)]
    # Linux counts in KiB.
    record["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if is_restored:
        record["losses_after"] = losses
    else:
        record["losses"] = losses
        if hasattr(contestant, "save"):
            record.update(_save(contestant, checkpoint))
    return {**record, "versions": find_versions(), "facts": contestant.facts}


def _save(contestant: Any, folder: Path) -> dict[str, Any]:
    start = time.perf_counter()
    contestant.save(str(folder))
    seconds = time.perf_counter() - start
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        "save_seconds": seconds,
        "saved_bytes": sum(path.stat().st_size for path in files),
        "losses_after": [contestant.run(1) for _ in range(_NUM_STEPS_AFTER)],
    }


def find_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest relative difference of two lists of losses."""
    pairs = zip(losses, expected, strict=True)
    return max(abs(loss - other) / abs(other) for loss, other in pairs)


def list_problems(found: Mapping[str, Any]) -> list[str]:
    """Returns a line for each contestant that failed, or reached other losses.

    Args:
        found: The records, by task and contestant.
    """
    lines = []
    for task, records in found.items():
        for name, record in records.items():
            if "problem" in record:
                lines.append(f"{name} on {task}: {record['problem']}")
                continue
            for what, difference in _differences(name, records).items():
                if not difference <= LOSS_TOLERANCE:
                    lines.append(
                        f"{name} on {task}: the losses {what} differ by "
                        f"{difference:.1e}, and {LOSS_TOLERANCE:.0e} is allowed."
                    )
    return lines


def _differences(name: str, records: Mapping[str, Any]) -> dict[str, float]:
    """Returns the differences of losses: from the scan by hand, and after a resume."""
    differences = {}
    cold = records[name]["cold"]
    by_hand = records.get(_BY_HAND, {})
    if name != _BY_HAND and "cold" in by_hand:
        expected = by_hand["cold"]["losses"]
        difference = find_difference(cold["losses"], expected)
        differences["of the first steps"] = difference
    if "losses_after" in cold:
        resumed = records[name]["warm"]["losses_after"]
        difference = find_difference(resumed, cold["losses_after"])
        differences["after the restore"] = difference
    return differences


def make_table(found: Mapping[str, Any]) -> Table:
    """Returns the table of all records, which `measure` returns for each task."""
    table = Table(title="From the start of a process to a restore", pad_edge=False)
    table.add_column("task")
    table.add_column("contestant")
    for title in (
        *("first step, cold", "warm", "host memory", "save", "restore", "saved"),
        *("losses next to the scan", "losses after the restore"),
    ):
        table.add_column(title, justify="right")
    for row in make_rows(found):
        table.add_row(*row)
    return table


def make_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Returns the cells of the table, as texts."""
    rows = []
    for task, records in found.items():
        for name, record in records.items():
            if "problem" in record:
                continue
            cold = record["cold"]
            warm = record["warm"]
            differences = _differences(name, records)
            rows.append(
                [
                    task,
                    name,
                    _seconds(cold["first_step_seconds"]),
                    _seconds(warm["first_step_seconds"]),
                    f"{cold['peak_bytes'] / 1e6:,.0f} MB",
                    _seconds(cold.get("save_seconds")),
                    _seconds(warm.get("restore_seconds")),
                    _megabytes(cold.get("saved_bytes")),
                    _agreement(differences.get("of the first steps")),
                    _agreement(differences.get("after the restore")),
                ]
            )
    return rows


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f} s"


def _megabytes(count: float | None) -> str:
    return "" if count is None else f"{count / 1e6:,.1f} MB"


def _agreement(difference: float | None) -> str:
    if difference is None:
        return ""
    return f"within {difference:.0e}" if difference else "equal bits"


if __name__ == "__main__":
    # As after Ctrl-C, the process of a contestant ends before this process does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
