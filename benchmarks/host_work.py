"""Measures the work of the host between two device programs, at 400 parameters.

    python -m benchmarks.host_work

Each loop of the `Controller` is one program here, and each program is waited for inside
its start. So what lies between the end of one start and the beginning of the next is
all that Python does for a loop: report the last one, begin, take the next chunk, lay
out the state. The processor time of the thread in between says how much of it is work
where other programs disturb the clock. What the start itself takes before the device
runs is a figure of its own, from a second run that waits for nothing.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from benchmarks.contestants.controller import ControllerContestant
from benchmarks.programs import watch_programs
from benchmarks.protocol import SIZES, Options
from benchmarks.report import add_measurement
from benchmarks.tasks import make_task

_TASK = "many-leaves"
_CHUNK_STEPS = 20
_WARM_UP_LOOPS = 20


class _Moment(NamedTuple):
    """A moment on the wall clock, and on that of this thread's processor time."""

    wall: float
    processor: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Measures the host's work per loop.")
    parser.add_argument("--loops", type=int, default=300)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--json", type=Path, metavar="PATH")
    given = parser.parse_args(arguments)
    measurement = measure(given.loops, given.size)
    low, high = measurement["between_quartiles_us"]
    Console().print(
        f"Host work between two programs: {measurement['between_us']:.0f} us, median "
        f"of {given.loops} loops (quartiles {low:.0f} to {high:.0f}; processor time "
        f"{measurement['between_processor_us']:.0f} us); the start of a "
        f"program: {measurement['start_us']:.0f} us; {measurement['parameters']} "
        "parameters.",
        soft_wrap=True,
    )
    if given.json is not None:
        add_measurement(given.json, "host_work", measurement)


def measure(num_loops: int, size: str = "full") -> dict[str, Any]:
    """Returns the figures, in microseconds.

    Args:
        num_loops: Loops to take the median over.
        size: Size of the task.
    """
    contestant = ControllerContestant()
    steps = _CHUNK_STEPS
    task = make_task(_TASK, size)
    contestant.setup(task, Options(steps_per_loop=steps))
    contestant.run(_WARM_UP_LOOPS * steps)
    entries: list[_Moment] = []
    exits: list[_Moment] = []

    def wait_inside(program: Any, call: Any, arguments: tuple[Any, ...]) -> Any:
        del program
        entries.append(_now())
        result = jax.block_until_ready(call(*arguments))
        exits.append(_now())
        return result

    def time_start(program: Any, call: Any, arguments: tuple[Any, ...]) -> Any:
        del program
        start = time.perf_counter()
        result = call(*arguments)
        starts.append(time.perf_counter() - start)
        return result

    with watch_programs(wait_inside):
        contestant.run(num_loops * steps)
    starts: list[float] = []
    with watch_programs(time_start):
        contestant.run(num_loops * steps)
    pairs = list(zip(exits[:-1], entries[1:], strict=True))
    between = [1e6 * (entry.wall - leave.wall) for leave, entry in pairs]
    processor = [1e6 * (entry.processor - leave.processor) for leave, entry in pairs]
    quartiles = statistics.quantiles(between, n=4)
    return {
        "between_us": statistics.median(between),
        "between_quartiles_us": [quartiles[0], quartiles[2]],
        "between_processor_us": statistics.median(processor),
        "start_us": 1e6 * statistics.median(starts),
        "programs": len(entries),
        "loops": num_loops,
        "steps_per_loop": steps,
        "parameters": contestant.num_parameters,
    }


def _now() -> _Moment:
    return _Moment(time.perf_counter(), time.thread_time())


if __name__ == "__main__":
    main()
