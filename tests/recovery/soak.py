"""Proves that a job with random faults ends like an undisturbed job, bit for bit.

    python -m tests.recovery.soak --faults 1000

Each fault ends an attempt of a job under `armillary launch`, or the whole job. The job
is then started again, as an operator would do. At the end, the state of each process,
its losses, the order of its examples and the results of the evaluator are compared. No
process and no incomplete checkpoint may be left, and the recorded times must add up.
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from tests.environment import REPOSITORY, forget_devices
from tests.launch.conftest import Launcher
from tests.patience import patience
from tests.recovery.faults import FAULTS, PHASES

TOPOLOGIES = (
    *("1", "2", "4", "1 --evaluator"),
    *("2 sharded", "4 sharded"),
    # With a divided state and snapshots in memory, which a lost process takes with it.
    *("1 memory", "2 memory", "4 memory"),
)
FAULTS_PER_JOB = 12
# The time that a fault may cost, and more if a limit has to pass first.
PATIENCE_SECONDS = 120.0
# Between two readings of clocks the system may give the core to another process.
MAX_UNKNOWN = 1e-2
# A single process is not watched for these faults.
UNSEEN = [("GIL", "import"), ("GIL", "join"), ("GIL", "end")]
SCRIPT = """
import tests.recovery.faults
tests.recovery.faults.run(str(name), restarts)
"""
Fault = dict[str, Any]


class Times(NamedTuple):
    """Seconds from a fault until the launcher or a process says who it hit, until the
    next attempt begins, and until the end of the first loop that follows."""

    named: float
    restarted: float
    stepped: float


class Outcome(NamedTuple):
    """The end of a job, and the seconds that each fault took."""

    finals: dict[str, Any]
    times: list[tuple[Fault, Times]]
    problems: list[str]


def is_possible(topology: str, kind: str, phase: str) -> bool:
    """Returns whether a fault is one, and somebody there may notice it."""
    if phase == "end" and kind in ("exit 0", "full disk"):
        return False  # All is done.
    if topology == "1 --evaluator":
        # It joins nobody, writes nothing, and who ends with 0 has done its work.
        phases = {"import", "restore", "evaluate", "end"}
        kinds = ("exit 0", "full disk", "stop")
        return phase in phases and kind not in kinds and (kind, phase) not in UNSEEN
    is_alone = topology.startswith("1")
    if is_alone and (kind in ("exit 0", "stop") or (kind, phase) in UNSEEN):
        return False
    if kind in ("stop", "GIL") and phase == "end":
        return False
    return not is_alone or phase != "join"


def make_faults(seed: int, topologies: Sequence[str] = TOPOLOGIES) -> Iterator[Fault]:
    """Yields faults for ever: each combination once, in any order, and again."""
    chance = random.Random(seed)
    number = 0
    while True:
        cases = [
            (topology, kind, phase)
            for topology in topologies
            for kind in FAULTS
            for phase in PHASES
            if is_possible(topology, kind, phase)
        ]
        chance.shuffle(cases)
        # Even a short run has all kinds.
        numbers = {kind: count() for kind in FAULTS}
        cases.sort(key=lambda case: [next(numbers[case[1]])])
        for topology, kind, phase in cases:
            target: object = chance.randrange(int(topology[0]))
            is_sharded = _is_sharded(topology)
            if kind == "full disk" and not is_sharded:
                target = 0  # The other processes write no files.
            elif "evaluator" in topology:
                target = "evaluator"
            # Process 0 is hit at any sync of a file. Other processes are hit when they
            # read the state, or at a sync of their own files.
            most = {"step": 2, "save": 3, "grace": 1}
            if target == 0:
                most |= {"save": 40, "grace": 10}
            elif is_sharded:
                most |= {"save": 20, "grace": 5}
            is_early = phase in ("import", "join")
            yield {
                "number": number,
                "topology": topology,
                "kind": kind,
                "phase": phase,
                "target": str(target),
                "countdown": chance.randrange(
                    most.get(phase, 2 if phase == "step" else 1)
                ),
                "patience": 3,
                "delay": chance.uniform(0, 0.5 if is_early else 0.05),
            }
            number += 1


def _is_sharded(topology: str) -> bool:
    return "sharded" in topology or "memory" in topology


class Soak:
    """Jobs that are compared with those to which nothing happens."""

    def __init__(self, folder: Path, say: Callable[[str], object]) -> None:
        self._folder, self._say = folder, say
        self._whole: dict[str, dict[str, Any]] = {}
        self._num_jobs = 0

    def run(self, faults: Sequence[Fault]) -> Outcome:
        """Runs a job, all of whose faults are for its topology."""
        topology = faults[0]["topology"]
        if topology not in self._whole:
            whole = self._run(topology, [])
            assert not whole.problems, whole.problems
            self._whole[topology] = whole.finals
        return self._run(topology, faults, self._whole[topology])

    def _run(
        self, topology: str, faults: Sequence[Fault], expected: Any = None
    ) -> Outcome:
        self._num_jobs += 1
        job = Job(self._folder / f"job_{self._num_jobs}", topology, faults)
        outcome = job.run()
        if outcome.finals != (expected or outcome.finals):
            outcome.problems.append("it ended otherwise than one that was left alone")
        job_name = f"job {self._num_jobs} ({topology})"
        for fault, times in outcome.times:
            what = f"{fault['kind']} of {fault['target']} in {fault['phase']}"
            self._say(f"{job_name}: {what}: {times}")
        for problem in outcome.problems:
            self._say(f"{job_name}: PROBLEM: {problem}")
        return outcome


class Job:
    """A job, with the faults of its attempts; those at its end come last."""

    def __init__(self, folder: Path, topology: str, faults: Sequence[Fault]) -> None:
        folder.mkdir()
        self._folder, self._topology = folder, topology
        self._faults = sorted(faults, key=lambda fault: fault["phase"] == "end")
        self._launcher = Launcher(folder)
        self._lines: list[tuple[float, str]] = []

    def run(self) -> Outcome:
        """Runs it, again after a power cut, until it has ended by itself."""
        code = -signal.SIGKILL
        while code == -signal.SIGKILL:
            code = self._run_once()
        problems = list(self._find_problems()) if code == 0 else []
        left = self._launcher.find_running()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        if left:
            problems.append(f"{len(left)} processes were left")
        if code:
            tail = "".join(line for _, line in self._lines[-40:])
            problems.append(f"exit code {code}:\n{tail}")
        finals = {
            path.name: json.loads(path.read_text())
            for path in self._folder.glob("final_*")
        }
        return Outcome(finals, [] if code else list(self._measure()), problems)

    def _run_once(self) -> int:
        """Starts the job with what has not happened; returns its exit code."""
        fired = [i for i, each in enumerate(self._faults) if self._find_time(each)]
        left = self._faults[max(fired, default=-1) + 1 :]
        group = "evaluator" if "evaluator" in self._topology else "workers"
        plan = {
            "num_steps": 16 * (FAULTS_PER_JOB + 1),
            "is_sharded": _is_sharded(self._topology),
            "has_memory": "memory" in self._topology,
            # A single process has no other one that holds a copy.
            "loses_memory": not self._topology.startswith("1"),
            "workers": [],
            "evaluator": [],
        }
        (self._folder / "plan.json").write_text(json.dumps({**plan, group: left}))
        workers = self._topology.removesuffix(" sharded").removesuffix(" memory")
        process = self._launcher.start(
            SCRIPT,
            f"--workers {workers} --max-restarts 20 --pause-seconds 0.1 "
            f"--grace-seconds {patience(15):g}",
            stdout=subprocess.DEVNULL,
            PYTHONPATH=str(REPOSITORY),
            XLA_FLAGS=forget_devices()["XLA_FLAGS"],
        ).process
        seconds = patience(PATIENCE_SECONDS) * (1 + len(left))
        timer = threading.Timer(seconds, process.send_signal, [signal.SIGQUIT])
        timer.start()
        try:
            assert process.stderr is not None
            self._lines += ((time.time(), line) for line in process.stderr)
        except KeyboardInterrupt:
            process.terminate()  # It ends its processes.
            raise
        finally:
            process.wait()
            process.stderr.close()
            timer.cancel()
        if process.returncode == -signal.SIGKILL:
            self._cut_power()
        return process.returncode

    def _cut_power(self) -> None:
        """Empties each file of a checkpoint that was not synced, and all memory."""
        while self._launcher.find_running():
            time.sleep(0.02)
        shutil.rmtree(self._folder / "memory", ignore_errors=True)
        for path in (self._folder / "run" / "checkpoints").rglob("checkpoint_*/**/*"):
            if path.is_file() and not os.access(path, os.X_OK):
                path.write_bytes(b"")

    def _find_time(self, fault: Fault) -> float | None:
        path = self._folder / f"fault_{fault['number']}"
        return float(path.read_text()) if path.exists() else None

    def _find_problems(self) -> Iterator[str]:
        for fault in self._faults:
            if self._find_time(fault) is None:
                yield f"no {fault['kind']} came: {fault}"
        directory = self._folder / "run" / "checkpoints"
        for path in directory.iterdir():
            if "tmp" in path.name or path.name.endswith("-removed"):
                yield f"`{path}` was left"
        for _, line in self._lines:
            # One that fails twice is stepped over, "unless" the next "is damaged".
            if "damaged" in line and "is skipped, but not removed" not in line:
                yield f"a checkpoint was torn: {line}"
        off = audit(directory)
        if off > MAX_UNKNOWN:
            yield f"{off:.2%} of the time are in no book, or in two"

    def _measure(self) -> Iterator[tuple[Fault, Times]]:
        log = (self._folder / "log").read_text().splitlines()
        steps = [float(line.split()[0]) for line in log]
        times = sorted(filter(None, map(self._find_time, self._faults)))
        for fault in self._faults:
            at, target = self._find_time(fault), fault["target"]
            if at is None:
                continue
            who = target if target == "evaluator" else f"worker {target}"
            name = rf"\[launcher\] {who}|process {target} of .*(gone|failed|join|stop)"
            name += f"|in process {target} of"
            named = self._find_line(name, at) if fault["kind"] != "power cut" else at
            what = target if target == "evaluator" else "worker"
            began = self._find_line(rf"\[launcher\] starts .*{what}", at)
            # Another fault may come first.
            end = min((each for each in times if each > at), default=math.inf)
            after = (step for step in steps if began < step < end)
            moments = named, began, min(after, default=math.nan)
            yield fault, Times(*(round(moment - at, 2) for moment in moments))

    def _find_line(self, pattern: str, after: float) -> float:
        sought = re.compile(pattern, re.IGNORECASE)
        found = (at for at, line in self._lines if at > after and sought.search(line))
        return next(found, math.nan)


def audit(directory: Path) -> float:
    """Returns which share of a run's time its journal does not account for, once."""
    from armillary.goodput import read_goodput
    from armillary.goodput._journal import FILE_NAME, read_entries

    entries = read_entries(directory / FILE_NAME)
    attempts = [list(lines) for _, lines in groupby(entries, lambda e: e.attempt)]
    starts = [lines[0].time - sum(lines[0].seconds.values()) for lines in attempts]
    seconds = attempts[-1][-1].time - starts[0]
    for lines, start in zip(attempts, starts[1:], strict=False):
        # After an end as planned, nobody waits.
        seconds -= max(0.0, start - lines[-1].time) if lines[-1].is_done else 0.0
    return abs(read_goodput(directory).total_seconds / seconds - 1)


def tabulate(times: Sequence[tuple[Fault, Times]]) -> str:
    """Returns a table of medians and 95th percentiles in seconds, by kind of fault."""
    found: defaultdict[str, list[Times]] = defaultdict(list)
    for fault, each in times:
        found[fault["kind"]].append(each)
        found["all"].append(each)
    lines = ["| fault | times | named | next attempt | next step |", "|" + " --- |" * 5]
    for kind in [*FAULTS, "all"]:
        cells = []
        for values in zip(*found[kind], strict=True):
            seen = sorted(value for value in values if not math.isnan(value))
            late = seen[math.ceil(0.95 * len(seen)) - 1] if seen else math.nan
            middle = statistics.median(seen) if seen else math.nan
            cells.append(f"{middle:.1f} ({late:.1f})")
        lines.append(f"| {kind} | {len(found[kind])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def soak(
    faults: Sequence[Fault], folder: Path, say: Callable[[str], object]
) -> tuple[str, list[str]]:
    """Lets faults happen; returns the table of times, and all problems."""
    runner, times, problems = Soak(folder, say), [], []
    for topology in dict.fromkeys(fault["topology"] for fault in faults):
        mine = [fault for fault in faults if fault["topology"] == topology]
        for start in range(0, len(mine), FAULTS_PER_JOB):
            outcome = runner.run(mine[start:][:FAULTS_PER_JOB])
            times += outcome.times
            problems += outcome.problems
    return tabulate(times), problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--topologies", nargs="*", default=TOPOLOGIES)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table, problems = soak(
            list(islice(make_faults(words.seed, words.topologies), words.faults)),
            Path(folder),
            lambda line: print(line, flush=True),  # noqa: T201
        )
    print(f"{table}\n{len(problems)} problems")  # noqa: T201
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
