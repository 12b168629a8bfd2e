"""Tests of real jobs in which one process dies or gets stuck."""

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from armillary.goodput import read_goodput
from armillary.launch import ExitCode
from tests.environment import JAX_RELEASE
from tests.multiprocess.conftest import DEADLINE, Job
from tests.patience import patience, wait_until
from tests.tiers import slow_after_first

PROGRAM = Path(__file__).with_name("program.py")
# The loops of these jobs must be shorter, on a busy machine too.
HANG_TIMEOUT = float(round(patience(4)))


class Watched(Job):
    """A job whose processes say how far they have come."""

    def read_step(self) -> int:
        """Returns the step that process 0 has written last."""
        path = self.folder / "at_0"
        return int(path.read_text() or 0) if path.exists() else 0

    def wait_for_step(self, step: int) -> None:
        def has_come() -> bool:
            has_ended = any(process.poll() is not None for process in self.processes)
            assert not has_ended, self.output(0)
            return self.read_step() >= step

        wait_until(has_come, lambda: self.output(0))

    def wait_for_ends(self, indices: list[int]) -> list[int | None]:
        """Returns the exit codes of some processes, which must end."""
        codes = self.wait(DEADLINE, *indices)
        for index, code in zip(indices, codes, strict=True):
            assert code is not None, f"process {index}:\n{self.output(index)}"
        return codes


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    jobs: list[Watched] = []

    def start(scenario: str, count: int = 2, **options: Any) -> Watched:
        job = Watched(tmp_path, PROGRAM, scenario, count, **options)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.end()


@slow_after_first(("count", "dead"), [(2, 0), (2, 1), (4, 2)])
def test_a_process_that_is_killed_is_named_by_the_others(start, count, dead):
    job = start("kill", count)
    job.wait_for_step(20)
    job.processes[dead].send_signal(signal.SIGKILL)
    alive = [index for index in range(count) if index != dead]
    codes = job.wait_for_ends(alive)
    if dead == 0 and JAX_RELEASE < (0, 10):
        # As soon as process 0 is gone, JAX ends the others in C++, perhaps first.
        assert set(codes) <= {ExitCode.FAILED, ExitCode.RESTART_REQUESTED}
        return

    assert codes == [ExitCode.RESTART_REQUESTED] * len(alive)
    for index in alive:
        assert f"Process {dead} of {count} is gone" in job.output(index)
        assert "ends with exit code 75 (RESTART_REQUESTED)" in job.output(index)


@pytest.mark.slow
def test_a_replacement_that_joins_early_ends_the_old_job_like_a_death(start):
    job = start("kill")
    job.wait_for_step(20)
    job.start(1)
    wait_until(lambda: "different incarnation" in job.output(0), "the replacement")
    time.sleep(1.0)  # By then JAX aborts the chief.
    job.processes[1].kill()
    assert job.wait_for_ends([0]) == [ExitCode.RESTART_REQUESTED]
    assert "Process 1 of 2 is gone" in job.output(0)


@pytest.mark.slow
@pytest.mark.parametrize(("stopped", "other"), [(0, 1), (1, 0)])
def test_a_stopped_process_ends_the_job_after_the_timeout(start, stopped, other):
    job = start("stop", limit_seconds=HANG_TIMEOUT)
    job.wait_for_step(20)
    time.sleep(patience(2.0))  # until each has reported to the other
    job.processes[stopped].send_signal(signal.SIGSTOP)
    codes = job.wait_for_ends([other])
    assert codes == [ExitCode.RESTART_REQUESTED]
    output = job.output(other)
    assert re.search(rf"process {stopped} of 2: .*has not answered for", output)
    if other == 0:  # only the chief, which is stopped otherwise, knows of all
        assert f"No process has made progress for {HANG_TIMEOUT:g} seconds:" in output
        place = r"at .*program.py:\d+ in"
        assert re.search(rf"process 0 of 2: \w+ for \d+ s, {place}", output)
        assert re.search(r"process 1 of 2: .*program.py", output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "place"),
    [
        ("restore", r"restoring for .* in load: time.sleep\(3600\)  # it is stuck"),
        ("sleep", r"data for .* in read: time.sleep\(3600\)  # the reader sleeps"),
        ("save", r"saving for \d+ s, with 0 B of \d B written, at "),
        ("act", r"action for .* in act: time.sleep\(3600\)  # the action sleeps"),
    ],
)
def test_every_process_prints_the_line_that_one_sleeps_at(start, scenario, place):
    job = start(scenario, limit_seconds=HANG_TIMEOUT)
    codes = job.wait_for_ends([0, 1])
    assert codes == [ExitCode.RESTART_REQUESTED] * 2
    for index in (0, 1):
        assert re.search(f"process 1 of 2: {place}", job.output(index))
        assert re.search(r"process 0 of 2: \w+ for \d+ s", job.output(index))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_process_that_holds_the_interpreter_ends_with_its_stack(start, count):
    job = start("gil", count, limit_seconds=HANG_TIMEOUT)
    job.wait_for_step(20)
    codes = job.wait_for_ends(list(range(count)))
    assert codes == [-signal.SIGKILL, ExitCode.RESTART_REQUESTED][:count]
    output = job.output(0)
    assert re.search(
        r"Timeout: it has run no Python (.*\n)+  File .*py.* in act", output
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_job_that_is_suspended_for_longer_than_its_limit_continues(start, count):
    job = start("suspend", count, limit_seconds=HANG_TIMEOUT)
    job.wait_for_step(20)
    for process in job.processes:
        process.send_signal(signal.SIGSTOP)
    # Longer than the limit, and than the watchdog waits after that.
    time.sleep(HANG_TIMEOUT + 15.0)
    step_then = job.read_step()
    for process in job.processes:
        process.send_signal(signal.SIGCONT)
    job.wait_for_step(step_then + 40)
    assert "ERROR" not in job.output(0)


@pytest.mark.slow
def test_a_process_that_the_others_wait_for_is_named_once(start):
    job = start("slow")
    # It is compared every ten loops, and on a busy machine the others may be slow, too.
    wait_until(lambda: "of 2 takes" in job.output(0), lambda: job.output(0))
    step_then = job.read_step()
    job.wait_for_step(step_then + 5 * 25)
    job.end()
    warnings = re.findall(r"WARNING: .*Process . of 2 takes .*", job.output(0))
    assert [line.count("Process 1 of 2") for line in warnings] == [1]
    assert "times as long as the others, mostly for data:" in warnings[0]
    assert "times as long" not in job.output(1)
    (straggler,) = read_goodput(job.folder / "checkpoints").stragglers
    assert straggler in warnings[0]


@pytest.mark.slow
def test_an_error_in_one_process_is_reported_by_all_and_keeps_its_own_exit_code(start):
    job = start("raise")
    codes = job.wait_for_ends([0, 1])
    assert codes[1] == ExitCode.FAILED
    assert codes[0] != 0
    for index in (0, 1):
        assert "OSError: the disk is on fire" in job.output(index)
    assert "PeerError: Another process has failed:\n  process 1 of 2" in job.output(0)
