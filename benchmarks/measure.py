"""Measures one case: starts its contestants, lets them take turns, compares."""

import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cases import Case
from benchmarks.contestants import REFERENCES
from benchmarks.processes import WorkerError, WorkerProcess
from benchmarks.ratios import choose_burst, find_faster, pair_ratios


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The length of a measurement.

    Attributes:
        rounds: Bursts of each contestant.
        seconds_per_burst: How long a burst of the first reference is, about.
        start_seconds: Deadline of building and compiling.
        burst_seconds: Deadline of one burst.
        pythons: Interpreters of contestants that need another one than this.
        environment: Variables that workers get.
        burst_steps: Steps of a burst; `None` finds them from `seconds_per_burst`.
        lead_in_steps: With `burst_steps`, steps that all run before the first round.
    """

    rounds: int = 5
    seconds_per_burst: float = 2.0
    start_seconds: float = 600.0
    burst_seconds: float = 600.0
    pythons: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    burst_steps: int | None = None
    lead_in_steps: int = 0


StartWorker = Callable[[str, Case, Settings], WorkerProcess]


def start_worker(name: str, case: Case, settings: Settings) -> WorkerProcess:
    """Starts the worker of one contestant."""
    options = case.options
    command = [
        settings.pythons.get(name, sys.executable),
        *("-m", "benchmarks.worker"),
        *("--contestant", name),
        *("--task", case.task),
        *("--size", case.size),
        *("--steps-per-loop", str(options.steps_per_loop)),
        *("--devices", str(options.devices)),
        *("--data", options.data),
        *("--dtype", options.dtype),
        *("--convolutions", options.convolutions),
    ]
    return WorkerProcess(name, command, settings.environment)


def measure_case(
    case: Case,
    contestants: Sequence[str],
    settings: Settings,
    start: StartWorker = start_worker,
) -> dict[str, Any]:
    """Measures one case.

    Contestants that cannot run the case, or fail, are left out with their reason. The
    others continue.

    Args:
        case: The case to run.
        contestants: The contestants. Without a reference there are no ratios.
        settings: The duration.
        start: Starts a worker, in the place of `start_worker` for tests.

    Returns:
        The entry of the report, as `benchmarks.report` describes it.
    """
    with contextlib.ExitStack() as stack:
        bench = Bench(settings)
        for name in contestants:
            bench.add(name, stack.enter_context(start(name, case, settings)))
        burst = bench.calibrate(case.options.steps_per_loop)
        for number in range(settings.rounds):
            bench.run_round(number, dict.fromkeys(bench.records, burst))
    return {
        "task": case.task,
        "size": case.size,
        "mode": case.mode,
        **dataclasses.asdict(case.options),
        "burst_steps": burst,
        **_compare(bench.records, burst),
        "skipped": bench.skipped,
        "failed": bench.failed,
    }


class Bench:
    """The workers of one case, which take turns.

    Attributes:
        records: The record of each contestant that runs: its `seconds` and `losses`,
            one for each burst, and its message when it was ready.
        skipped: Why contestants do not support the case, by name.
        failed: Why contestants failed, by name.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._workers: dict[str, WorkerProcess] = {}
        self.records: dict[str, dict[str, Any]] = {}
        self.skipped: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def add(self, name: str, worker: WorkerProcess) -> None:
        """Waits until a worker is ready; one at a time, so that none starves."""
        self._workers[name] = worker
        with self.dropping(name):
            ready = worker.wait_ready(self._settings.start_seconds)
            self.records[name] = {
                "seconds": [],
                "losses": [],
                "setup_seconds": ready["setup_seconds"],
                "versions": ready["versions"],
                "facts": ready["facts"],
            }

    def calibrate(self, steps_per_loop: int) -> int:
        """Returns the steps of a burst, from the first contestant that runs.

        The others then run as many steps, so that all losses stay comparable.
        """
        if self._settings.burst_steps is not None:
            for name in [*self.records]:
                with self.dropping(name):
                    self.run(name, self._settings.lead_in_steps)
            return self._settings.burst_steps
        total, burst = 0, steps_per_loop
        while self.records and not total:
            first = next(iter(self.records))
            with self.dropping(first):
                total, burst = self._find_burst(first, steps_per_loop)
        for name in [*self.records][1:]:
            with self.dropping(name):
                self.run(name, total)
        return burst

    def run_round(self, number: int, bursts: Mapping[str, int]) -> None:
        """Runs a burst of each contestant; who is first changes from round to round.

        Args:
            number: Which round it is.
            bursts: Steps of the burst of each contestant.
        """
        names = list(self.records)
        shift = number % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            with self.dropping(name):
                ran = self.run(name, bursts[name])
                self.records[name]["seconds"].append(ran["seconds"])
                self.records[name]["losses"].append(ran["loss"])

    def _find_burst(self, name: str, steps_per_loop: int) -> tuple[int, int]:
        """Runs more and more steps until they say how long one takes."""
        wanted = self._settings.seconds_per_burst
        total, steps = 0, steps_per_loop
        while True:
            ran = self.run(name, steps)
            total += steps
            burst = choose_burst(ran["seconds"] / steps, wanted, steps_per_loop)
            if ran["seconds"] >= wanted / 4 or burst <= steps:
                return total, burst
            steps = min(burst, 10 * steps)

    def run(self, name: str, steps: int) -> dict[str, Any]:
        """Runs steps of one contestant, and waits until it rests.

        Raises:
            WorkerError: If it fails.
        """
        worker = self._workers[name]
        ran = worker.run(steps, self._settings.burst_seconds)
        worker.settle()
        return ran

    @contextlib.contextmanager
    def dropping(self, name: str) -> Iterator[None]:
        """Drops a contestant that fails, and continues with the others."""
        try:
            yield
        except WorkerError as error:
            self.records.pop(name, None)
            (self.skipped if error.skip else self.failed)[name] = str(error)
            self._workers[name].kill()


def _compare(records: dict[str, dict[str, Any]], burst: int) -> dict[str, Any]:
    """Adds speeds and ratios to the records."""
    seconds = {name: record["seconds"] for name, record in records.items()}
    for record in records.values():
        record["steps_per_second"] = burst / statistics.median(record["seconds"])
    if not any(seconds.get(name) for name in REFERENCES):
        return {"reference": None, "contestants": records}
    reference = find_faster(seconds, REFERENCES)
    for name, record in records.items():
        ratio = pair_ratios(seconds[reference], seconds[name])
        record["ratio"] = dataclasses.asdict(ratio)
    return {"reference": reference, "contestants": records}
