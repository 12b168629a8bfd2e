"""Tests of when a job counts as stuck, and of its message, with simulated time."""

import subprocess
import sys
from typing import Any

import numpy as np

from armillary.lifeline import _ending
from armillary.lifeline._ending import Pace, Phase, Report, Sighting
from tests.patience import wait_until

NOW = 1000.0


def see(quiet: float = 50.0, silent: float = 0.0, **fields: Any) -> Sighting:
    """Returns a process that has not gone on, and was last heard of."""
    fields = {
        "phase": "step",
        "line": "train.py:1 in main",
        "limit_seconds": 30.0,
    } | fields
    return Sighting(Report(quiet_seconds=quiet - silent, **fields), NOW - silent)


def find_hang(*sightings: Sighting) -> str | None:
    return _ending.find_hang(dict(enumerate(sightings)), len(sightings), NOW)


def test_a_job_is_stuck_when_no_process_continues():
    text = find_hang(see(), see(31, phase="data", line="train.py:7 in read"))
    assert text == (
        "No process has made progress for 30 seconds:\n"
        "  process 0 of 2: step for 50 s, at train.py:1 in main\n"
        "  process 1 of 2: data for 31 s, at train.py:7 in read\n"
        "Look at the process that does not wait for another one, or allow more time: "
        "`hang_timeout_seconds` of the `Controller` must exceed the longest loop, "
        "evaluation, save and action. By default, it is five times the longest so "
        "far, and at least 300 seconds."
    )


def test_a_stuck_save_is_named_with_its_bytes():
    text = find_hang(see(31, phase="saving", moved="1 MB of 2 MB written")) or ""
    place = "at train.py:1 in main"
    assert f"saving for 31 s, with 1 MB of 2 MB written, {place}" in text


def test_only_a_running_process_that_could_answer_is_stopped():
    silent = see(silent=9)
    sightings = [
        see(),
        silent,
        silent._replace(by=1),
        silent._replace(report=silent.report._replace(has_ended=True)),
    ]
    assert _ending.find_stopped(dict(enumerate(sightings)), NOW) == [1]


def test_a_process_that_continues_is_waited_for():
    assert find_hang(see(), see(quiet=3)) is None


def test_a_process_without_a_limit_is_waited_for():
    assert find_hang(see(), see(limit_seconds=None)) is None
    assert find_hang(see(limit_seconds=None)) is None


def test_a_process_that_was_stopped_before_its_loop_is_not_waited_for():
    stopped = see(quiet=40, silent=40, limit_seconds=None, phase="outside of loops")
    text = find_hang(see(), stopped) or ""
    assert "process 1 of 2: outside of loops for 40 s" in text


def test_a_process_that_was_stopped_counts_by_its_silence():
    assert find_hang(see(), see(quiet=31, silent=31)) is not None
    assert find_hang(see(), see(quiet=29, silent=29)) is None
    text = find_hang(see(), see(quiet=33, silent=32)) or ""
    assert "it has not answered for 32 s (stopped?)" in text


def test_a_process_that_ended_is_named_and_not_waited_for():
    text = find_hang(see(), see(quiet=0, has_ended=True, limit_seconds=None))
    assert text is not None
    assert "process 1 of 2: has reached the end of its program" in text
    assert find_hang(see(has_ended=True), see(quiet=1, has_ended=True)) is None
    text = find_hang(see(has_ended=True), see(has_ended=True)) or ""
    assert "process 0 of 2: has reached the end" in text


class Program:
    """A simulated program, which is looked at once a second, as by a lifeline."""

    def __init__(self) -> None:
        self.now, self.moves, self.worked = 0.0, 0, 0.0
        self.pace, self.next_look = Pace(0.0), 0.0

    def spend(self, seconds: float, phase: str, work: float = 0.0) -> bool:
        """Spends time in a phase; returns whether it counted as stuck meanwhile."""
        self.moves += 1
        end, is_stuck = self.now + seconds, False
        while self.next_look < end:
            self.now = self.next_look
            busy = self.worked + work * (seconds - (end - self.now))
            observed = Phase(phase, self.moves)
            self.pace.look(observed, busy, self.now)
            limit = self.pace.find_limit(None) + self.pace.busy_seconds
            may_be = None if phase == "compiling" else limit
            report = Report(phase, "x.py:1", self.now - self.pace.began, may_be)
            seen = {0: Sighting(report, self.now)}
            is_stuck |= _ending.find_hang(seen, 1, self.now) is not None
            self.next_look += 1.0
        self.now, self.worked = end, self.worked + work * seconds
        return is_stuck


def test_a_slow_program_is_never_stuck_without_a_limit_of_its_own():
    program, random = Program(), np.random.default_rng(0)
    assert not program.spend(280.0, "data")  # A slow first batch.
    assert not program.spend(3000.0, "start_up", work=0.02)
    assert not program.spend(60.0, "compiling")
    assert not program.spend(7200.0, "compiling")
    for loop in range(10_000):
        assert not program.spend(3.0 * random.lognormal(0.0, 0.8), "stepping")
        if loop % 100 == 0:
            assert not program.spend(60.0 * random.lognormal(0.0, 0.4), "evaluating")
    assert not program.spend(290.0, "saving")
    assert not program.spend(1400.0, "saving")  # Less than five times as long.


def test_without_a_limit_of_its_own_a_program_is_stuck_after_five_times_the_longest():
    program = Program()
    assert program.spend(303.0, "stepping")
    assert program.spend(1600.0, "stepping", work=0.001)
    assert not program.spend(1600.0, "stepping")  # It took as long before.


def test_a_stopped_process_is_called_so_when_the_timeout_is_short():
    short = {"limit_seconds": 4.0}
    text = find_hang(see(quiet=4, **short), see(quiet=4.2, silent=3.5, **short)) or ""
    assert "process 1 of 2: step for 4 s, at train.py:1 in main; it has not ans" in text
    assert text.count("it has not answered") == 1


def test_time_while_the_process_is_stopped_does_not_count():
    pace = Pace(0.0)
    pace.look(Phase("data", 1), 0.0, 0.0)
    pace.skip(1000.0)  # Ctrl-Z, and `fg`
    assert 1010.0 - pace.began == 10.0
    assert pace.busy_seconds == 0.0


def test_the_work_of_child_processes_is_a_sign_of_life():
    before = _ending.read_work_seconds("start_up")
    program = "import time\nwhile time.process_time() < 1: pass\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1) as child:
        wait_until(lambda: _ending.read_work_seconds("start_up") >= before + 0.9)
        child.communicate(b"\n")
