"""Measures one case: starts its contestants, lets them take turns, compares."""

import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cases import Case
from benchmarks.contestants import REFERENCES
from benchmarks.processes import WorkerError, WorkerProcess
from benchmarks.ratios import choose_burst, find_faster, pair_ratios
from benchmarks.tasks import make_task


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How long to measure.

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

    Contestants that cannot run the case, or fail, are left out with their reason; the
    others go on.

    Args:
        case: What to run.
        contestants: Who runs it. Without a reference there are no ratios.
        settings: How long.
        start: Starts a worker, in the place of `start_worker` for tests.

    Returns:
        The entry of the report, as `benchmarks.report` describes it.
    """
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        bench = _Bench(settings, skipped, failed)
        for name in contestants:
            bench.add(name, stack.enter_context(start(name, case, settings)))
        burst = bench.calibrate(case.options.steps_per_loop)
        for number in range(settings.rounds):
            bench.run_round(number, burst)
        records = bench.records
    return {
        "task": case.task,
        "size": case.size,
        "mode": case.mode,
        **dataclasses.asdict(case.options),
        "flops_per_step": make_task(case.task, case.size).flops_per_step,
        "burst_steps": burst,
        **_compare(records, burst),
        "skipped": skipped,
        "failed": failed,
    }


class _Bench:
    """The workers of one case."""

    def __init__(
        self, settings: Settings, skipped: dict[str, str], failed: dict[str, str]
    ) -> None:
        self._settings = settings
        self._skipped, self._failed = skipped, failed
        self._workers: dict[str, WorkerProcess] = {}
        self.records: dict[str, dict[str, Any]] = {}

    def add(self, name: str, worker: WorkerProcess) -> None:
        """Waits until a worker is ready; one at a time, so that none starves."""
        self._workers[name] = worker
        with self._dropping(name):
            ready = worker.wait_ready(self._settings.start_seconds)
            self.records[name] = {
                "seconds": [],
                "losses": [],
                "setup_seconds": ready["setup_seconds"],
                "peak_bytes": ready["peak_bytes"],
                "versions": ready["versions"],
                "facts": ready.get("facts", {}),
                "idle_cpu_seconds": 0.0,
            }

    def calibrate(self, steps_per_loop: int) -> int:
        """Returns the steps of a burst, from the first contestant that runs.

        The others then run as many steps, so that all losses stay comparable.
        """
        if self._settings.burst_steps is not None:
            for name in [*self.records]:
                with self._dropping(name):
                    self._run(name, self._settings.lead_in_steps)
            return self._settings.burst_steps
        total, burst = 0, steps_per_loop
        while self.records and not total:
            first = next(iter(self.records))
            with self._dropping(first):
                total, burst = self._find_burst(first, steps_per_loop)
        for name in [*self.records][1:]:
            with self._dropping(name):
                self._run(name, total)
        return burst

    def run_round(self, number: int, steps: int) -> None:
        """Runs a burst of each contestant; who is first changes from round to round."""
        names = list(self.records)
        shift = number % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            with self._dropping(name):
                before = self._idle_times(name)
                ran = self._run(name, steps)
                for other, start in before.items():
                    end = self._workers[other].cpu_seconds()
                    if other in self.records and end is not None:
                        self.records[other]["idle_cpu_seconds"] += end - start
                record = self.records[name]
                record["seconds"].append(ran["seconds"])
                record["losses"].append(ran["loss"])
                record["peak_bytes"] = max(
                    record["peak_bytes"], ran.get("peak_bytes", 0)
                )

    def _find_burst(self, name: str, steps_per_loop: int) -> tuple[int, int]:
        """Runs more and more steps until they say how long one takes."""
        wanted = self._settings.seconds_per_burst
        total, steps = 0, steps_per_loop
        while True:
            ran = self._run(name, steps)
            total += steps
            burst = choose_burst(ran["seconds"] / steps, wanted, steps_per_loop)
            if ran["seconds"] >= wanted / 4 or burst <= steps:
                return total, burst
            steps = min(burst, 10 * steps)

    def _run(self, name: str, steps: int) -> dict[str, Any]:
        worker = self._workers[name]
        ran = worker.run(steps, self._settings.burst_seconds)
        worker.settle()
        return ran

    def _idle_times(self, running: str) -> dict[str, float]:
        times = {
            name: self._workers[name].cpu_seconds()
            for name in self.records
            if name != running
        }
        return {name: used for name, used in times.items() if used is not None}

    @contextlib.contextmanager
    def _dropping(self, name: str) -> Any:
        """Drops a contestant that fails, and goes on with the others."""
        try:
            yield
        except WorkerError as error:
            self.records.pop(name, None)
            (self._skipped if error.skip else self._failed)[name] = str(error)
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
