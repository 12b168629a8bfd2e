"""Measures what a checkpoint every 100 steps, written in the background, costs.

    python -m benchmarks.checkpoint_cost

`armillary` and `armillary-saving` take turns, in bursts of 100 steps. Each burst has
its save in the middle, so that copying, writing and whatever they slow down all fall
into its time.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks.cases import Case
from benchmarks.contestants import SAVE_INTERVAL
from benchmarks.measure import Settings, StartWorker, measure_case, start_worker
from benchmarks.protocol import SIZES, Options
from benchmarks.ratios import pair_ratios
from benchmarks.report import add_measurement, make_parser
from benchmarks.tasks import TASKS

_STEPS_PER_LOOP = 10


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints.

    Raises:
        SystemExit: If a contestant failed.
    """
    parser = make_parser("checkpoint_cost", "Measures the cost of checkpoints.")
    parser.add_argument("--task", choices=TASKS, default="bert")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    measurement = measure(given.task, given.size, given.rounds)
    if "ratio" not in measurement:
        raise SystemExit(f"Checkpoints were not measured: {measurement['failed']}")
    ratio = measurement["ratio"]
    Console().print(
        f"Speed of {given.task} with a checkpoint every {SAVE_INTERVAL} steps, "
        f"relative to none: {ratio['median']:.3f} ({ratio['low']:.3f} to "
        f"{ratio['high']:.3f}).",
        soft_wrap=True,
    )
    add_measurement(given.json, "checkpoint_cost", measurement)


def measure(
    task: str, size: str, rounds: int, start: StartWorker = start_worker
) -> dict[str, Any]:
    """Returns the seconds of both and the speed with saves relative to that without.

    Args:
        task: Name of the task.
        size: Its size.
        rounds: Bursts of each.
        start: Starts a worker.
    """
    options = Options(steps_per_loop=_STEPS_PER_LOOP)
    settings = Settings(
        rounds=rounds,
        burst_steps=SAVE_INTERVAL,
        # The loop that compiles saves too. From there it is half a burst to the middle
        # of one.
        lead_in_steps=SAVE_INTERVAL // 2,
    )
    names = ("armillary", "armillary-saving")
    case = Case(task=task, options=options, size=size)
    entry = measure_case(case, names, settings, start)
    if not all(name in entry["contestants"] for name in names):
        return entry
    without, saving = (entry["contestants"][name]["seconds"] for name in names)
    return {**entry, "ratio": dataclasses.asdict(pair_ratios(without, saving))}


if __name__ == "__main__":
    main()
