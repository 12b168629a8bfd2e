"""Measures the start of a program: its import, and what it compiles.

    python -m benchmarks.start_time

Armillary's own modules are imported when its first name is used: a few processes time
that, after `import jax, flax`. Then, for each task, Armillary and the scan by hand take
turns. For each of them, two processes, one after the other, share a persistent
compilation cache that is empty at first. Each counts its compilations until its first
loop has run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.processes import REPOSITORY, ask_module
from benchmarks.protocol import SIZES, Options
from benchmarks.report import add_measurement, make_parser
from benchmarks.tasks import TASKS, make_task

_HIT = "/jax/compilation_cache/cache_hits"
_MISS = "/jax/compilation_cache/cache_misses"
_DEADLINE_SECONDS = 600
_STEPS_PER_LOOP = 20
_TASKS = ("mlp", "cnn", "bert", "many-leaves")
_OURS, _BY_HAND = "armillary", "reference-scan"
_IMPORT = """
import time
import jax, flax
from flax import nnx
start = time.perf_counter()
import armillary
armillary.Controller
print(time.perf_counter() - start)
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = make_parser("start_time", "Measures the start of a program.")
    parser.add_argument("--task", choices=TASKS, nargs="+", default=_TASKS)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--imports", type=int, default=9, metavar="N")
    parser.add_argument("--pairs", type=int, default=3, metavar="N")
    parser.add_argument("--cache", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.cache is not None:
        name, folder = given.cache
        found = start_once(name, given.task[0], given.size, folder)
        sys.stdout.write(json.dumps(found))
        return
    seconds = time_imports(given.imports)
    Console().print(
        f"import armillary, after jax and flax: {statistics.median(seconds):.3f} s, "
        f"median of {len(seconds)} processes ({min(seconds):.3f} to "
        f"{max(seconds):.3f}).",
        soft_wrap=True,
    )
    tasks = {task: measure(task, given.size, given.pairs) for task in given.task}
    Console().print(_make_table(tasks))
    add_measurement(given.json, "start_time", {"imports": seconds, "tasks": tasks})


def _make_table(tasks: dict[str, Any]) -> Table:
    title = f"Seconds to the end of the first loop of {_STEPS_PER_LOOP} steps"
    table = Table("task", "cache", "armillary", "by hand", "ratio", title=title)
    for task, measurement in tasks.items():
        for start, cache in (("first", "cold"), ("second", "warm")):
            ours, by_hand = (
                [pair[name][start]["seconds"] for pair in measurement["pairs"]]
                for name in (_OURS, _BY_HAND)
            )
            ratios = [a / b for a, b in zip(ours, by_hand, strict=True)]
            medians = map(statistics.median, (ours, by_hand, ratios))
            table.add_row(task, cache, *(f"{median:.2f}" for median in medians))
    return table


def time_imports(num_processes: int) -> list[float]:
    """Returns the seconds of the import in each of some processes.

    One more before them fills the caches of the file system and of compiled modules.
    """
    seconds = []
    for _ in range(num_processes + 1):
        result = subprocess.run(
            [sys.executable, "-c", _IMPORT],
            capture_output=True,
            check=True,
            cwd=REPOSITORY,
            text=True,
            timeout=_DEADLINE_SECONDS,
        )
        seconds.append(float(result.stdout))
    return seconds[1:]


def measure(task: str, size: str, num_pairs: int) -> dict[str, Any]:
    """Returns, for each pair, what the first and second process of each side found.

    Args:
        task: Name of the task.
        size: Its size.
        num_pairs: How often. The two sides take turns in beginning.
    """
    pairs = []
    for number in range(num_pairs):
        names = (_OURS, _BY_HAND) if number % 2 == 0 else (_BY_HAND, _OURS)
        pairs.append({name: _start_twice(name, task, size) for name in names})
    return {"task": task, "pairs": pairs}


def _start_twice(name: str, task: str, size: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="armillary-bench-") as folder:
        found = [
            ask_module(
                "benchmarks.start_time",
                *("--task", task, "--size", size, "--cache", name, folder),
                timeout_seconds=_DEADLINE_SECONDS,
            )
            for _ in range(2)
        ]
    return {"first": found[0], "second": found[1]}


def start_once(name: str, task: str, size: str, folder: str) -> dict[str, Any]:
    """Runs the first loop of a program; returns what that took.

    Args:
        name: Name of the contestant.
        task: Name of the task.
        size: Its size.
        folder: The persistent compilation cache.
    """
    start = time.perf_counter()
    import jax

    from armillary import xla
    from benchmarks.contestants import make_contestant

    events: list[str] = []

    def note(event: str, **details: object) -> None:
        del details
        events.append(event)

    jax.monitoring.register_event_listener(note)
    xla.use_compilation_cache(folder)
    contestant = make_contestant(name)
    contestant.setup(make_task(task, size), Options(steps_per_loop=_STEPS_PER_LOOP))
    contestant.run(_STEPS_PER_LOOP)
    return {
        "compiled": events.count(_MISS),
        "from_cache": events.count(_HIT),
        "seconds": time.perf_counter() - start,
    }


if __name__ == "__main__":
    main()
