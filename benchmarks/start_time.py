"""Measures the start of a program: its import, and what it compiles.

    python -m benchmarks.start_time

Armillary's own modules are imported when its first name is used: a few processes time
that, after `import jax, flax`. Then two processes, one after the other, share a
persistent compilation cache that is empty at first. Each counts what it compiles until
its first loop has run.
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

from benchmarks.processes import REPOSITORY, ask_module
from benchmarks.protocol import SIZES, Options
from benchmarks.report import add_measurement, make_parser
from benchmarks.tasks import TASKS, make_task

_HIT = "/jax/compilation_cache/cache_hits"
_MISS = "/jax/compilation_cache/cache_misses"
_DEADLINE_SECONDS = 600
_STEPS_PER_LOOP = 100
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
    parser.add_argument("--task", choices=TASKS, default="many-leaves")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--imports", type=int, default=9, metavar="N")
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.cache is not None:
        sys.stdout.write(json.dumps(start_once(given.task, given.size, given.cache)))
        return
    seconds = time_imports(given.imports)
    Console().print(
        f"import armillary, after jax and flax: {statistics.median(seconds):.3f} s, "
        f"median of {len(seconds)} processes ({min(seconds):.3f} to "
        f"{max(seconds):.3f}).",
        soft_wrap=True,
    )
    measurement = {"imports": seconds, **measure(given.task, given.size)}
    for name in ("first", "second"):
        found = measurement[name]
        Console().print(
            f"{name} start of {given.task}: {found['compiled']} programs compiled, "
            f"{found['from_cache']} from the cache, {found['seconds']:.1f} s to the "
            "end of the first loop.",
            soft_wrap=True,
        )
    add_measurement(given.json, "start_time", measurement)


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


def measure(task: str, size: str) -> dict[str, Any]:
    """Returns what the first and the second process found.

    Args:
        task: Name of the task.
        size: Its size.
    """
    with tempfile.TemporaryDirectory(prefix="armillary-bench-") as folder:
        found = [
            ask_module(
                "benchmarks.start_time",
                *("--task", task, "--size", size, "--cache", folder),
                timeout_seconds=_DEADLINE_SECONDS,
            )
            for _ in range(2)
        ]
    return {"task": task, "first": found[0], "second": found[1]}


def start_once(task: str, size: str, folder: str) -> dict[str, Any]:
    """Runs the first loop of a program; returns what that took.

    Args:
        task: Name of the task.
        size: Its size.
        folder: The persistent compilation cache.
    """
    start = time.perf_counter()
    import jax

    from armillary import xla
    from benchmarks.contestants.controller import ControllerContestant

    events: list[str] = []

    def note(event: str, **details: object) -> None:
        del details
        events.append(event)

    jax.monitoring.register_event_listener(note)
    xla.use_compilation_cache(folder)
    contestant = ControllerContestant()
    contestant.setup(make_task(task, size), Options(steps_per_loop=_STEPS_PER_LOOP))
    contestant.run(_STEPS_PER_LOOP)
    return {
        "compiled": events.count(_MISS),
        "from_cache": events.count(_HIT),
        "seconds": time.perf_counter() - start,
    }


if __name__ == "__main__":
    main()
