"""Tests of workers that do not join, of their children, and of a launcher that ends."""

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from armillary.launch import ExitCode, _machines, _process
from armillary.launch._environment import DevicePlan
from armillary.launch._group import Job
from armillary.launch._machines import Machines
from armillary.launch._process import Child, LaunchedProcess
from armillary.launch._supervisor import run_job
from tests.environment import REPOSITORY
from tests.launch.conftest import is_running
from tests.patience import patience, wait_until
from tests.tiers import slow_after_first

SLEEP = "import time; time.sleep(300)\n"


@pytest.mark.slow
def test_the_same_failure_ends_a_job_that_asked_for_no_limit(launcher):
    code, _, stderr = launcher.run(
        "raise RuntimeError('boom')\n", "--max-restarts 10 --pause-seconds 0"
    )
    assert code == ExitCode.TOO_MANY_RESTARTS
    words = "the same failure 3 times without a newer checkpoint: RuntimeError: boom."
    assert f"[launcher] {words}\n" in stderr
    assert stderr.count("[launcher] starts 1 worker") == 3


@pytest.mark.slow
def test_a_job_whose_worker_never_joins_ends_immediately(launcher):
    # `run` waits for less than this grace.
    code, _, stderr = launcher.run(
        """
        from armillary import _launcher
        if index == 1:
            wait_for_mark("joining_0")
            wait_for_mark("joining_2")
            os._exit(0)
        _launcher.notify_launcher("joining")
        mark(f"joining_{index}")
        time.sleep(300)
        """,
        "--workers 3 --grace-seconds 100000",
        PYTHONPATH=str(REPOSITORY),
    )
    assert code == ExitCode.RESTART_REQUESTED
    assert "worker 1 of 3 failed first: exit code 0 after" in stderr
    assert "s, while others needed it." in stderr


@pytest.mark.slow
def test_nobody_comes_to_wait_for_a_worker_that_failed_before(launcher):
    # `run` waits for less than this grace.
    code, _, stderr = launcher.run(
        """
        from armillary import _launcher
        if index == 2:
            _launcher.notify_launcher("joining")
            mark(f"joining_{restarts}")
        if index == 0:
            wait_for_mark(f"joining_{restarts}")
            os._exit(1)
        time.sleep(300)  # As one that imports.
        """,
        "--workers 3 --grace-seconds 100000 --max-restarts 1 --pause-seconds 0",
        PYTHONPATH=str(REPOSITORY),
    )
    assert code == ExitCode.TOO_MANY_RESTARTS
    assert stderr.count("2 of 3 still run, and wait in vain to join it.") == 2
    assert stderr.count("SIGTERM: sent to worker 1, 2, which still ran.") == 2
    assert "in <module>" not in stderr


@pytest.mark.slow
def test_a_worker_that_is_stuck_before_it_joins_shows_its_line(launcher):
    code, _, stderr = launcher.run(
        """
        from armillary import _launcher
        if index == 1:
            mark("stuck")
            time.sleep(300)
        wait_for_mark("stuck")
        _launcher.notify_launcher("joining")
        sys.exit(75)
        """,
        "--workers 2 --grace-seconds 0.5 --max-restarts 0",
        PYTHONPATH=str(REPOSITORY),
    )
    assert code == ExitCode.RESTART_REQUESTED
    assert "worker 1 of 2 failed first: did not go on, and was ended" in stderr
    assert re.search(r"\|   File .*script.py\", line \d+ in <module>", stderr)


@pytest.mark.slow
def test_compiled_programs_stay_for_the_job_and_no_longer(launcher, tmp_path):
    script = """
        folder = os.environ["JAX_COMPILATION_CACHE_DIR"]
        print(folder, os.listdir(folder))
        open(os.path.join(folder, "program"), "w").close()
        sys.exit(0 if restarts else 75)
        """
    options = "--max-restarts 1 --pause-seconds 0"
    _, stdout, _ = launcher.run(script, options, JAX_COMPILATION_CACHE_DIR="")
    before, after = (line.split(maxsplit=2)[2] for line in stdout.splitlines())
    folder = before.removesuffix(" []")
    assert after == f"{folder} ['program']"
    assert not os.path.exists(folder)
    own = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    assert str(tmp_path) in launcher.run(script, options, **own)[1]


@pytest.mark.slow
def test_children_of_a_worker_end_with_it(launcher):
    code, stdout, _ = launcher.run(
        """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        print(child.pid)
        """
    )
    assert code == ExitCode.OK
    pid = int(stdout.removeprefix("[worker 0] "))
    wait_until(lambda: not is_running(pid), "the child's end")


@pytest.mark.slow
def test_an_exit_code_is_read_even_if_sigchld_is_ignored(launcher):
    old = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        launcher.start("sys.exit(75)\n")
    finally:
        signal.signal(signal.SIGCHLD, old)
    assert launcher.finish()[0] == ExitCode.RESTART_REQUESTED


@pytest.mark.slow
def test_a_signal_ignored_from_the_start_stays_ignored(launcher):
    # As a shell does for a program in the background (SIGINT), and `nohup` (SIGHUP).
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launcher.start(
            "os.kill(os.getppid(), signal.SIGHUP)\ntime.sleep(0.5)\nprint('ended')\n"
        )
    finally:
        signal.signal(signal.SIGHUP, old)
    code, stdout, _ = launcher.finish()
    assert (code, stdout) == (ExitCode.OK, "[worker 0] ended\n")


@pytest.mark.slow
def test_a_worker_whose_launcher_is_gone_does_not_start(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('started')")
    command = [sys.executable, str(script)]
    ended = subprocess.run(
        [sys.executable, "-c", _process._TIE, "999999999", "X", "2", *command],
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("the launcher of this worker is gone")


@pytest.mark.slow
def test_a_paused_terminal_does_not_keep_a_signal_from_the_workers(launcher):
    launcher.start(
        """
        def save(number, frame):
            mark("saved")
            os._exit(77)
        signal.signal(signal.SIGTERM, save)
        mark("ready")
        while True:
            os.write(1, b"x" * 99 + b"\\n")
        """
    )
    launcher.wait_for_mark("ready")
    time.sleep(1.0)  # Nobody reads, so that every pipe is full by now.
    launcher.process.send_signal(signal.SIGTERM)
    launcher.wait_for_mark("saved")
    time.sleep(0.5)
    assert launcher.process.poll() is None
    code, stdout, stderr = launcher.finish()
    assert code == ExitCode.PREEMPTED, stderr
    # Some lines are cut off in the pipe of the worker, which ended in one of them.
    *lines, _ = stdout.splitlines()
    assert set(lines) == {"[worker 0] " + "x" * 99}


def make_job(arguments, num_workers=2, **options):
    return Job(
        arguments=arguments,
        machines=Machines(num_workers, DevicePlan()),
        max_restarts=0,
        pause_seconds=0.0,
        grace_seconds=30.0,
        logs={},
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "num_workers", "message"),
    [
        ("worker 1", 2, "cannot start a process: no more processes."),
        ("evaluator", 1, "cannot start a process: no more processes."),
    ],
)
def test_a_process_that_cannot_start_is_a_failure(
    monkeypatch, capfd, missing, num_workers, message
):
    started = {}

    def start(label, arguments, environment):
        if label == missing:
            raise OSError("no more processes")
        started[label] = Child(label, arguments, environment)
        return started[label]

    monkeypatch.setattr(_machines, "Child", start)
    is_worker = missing != "evaluator"
    program = SLEEP if is_worker else "print('trained')"
    job = make_job(["-c", program], num_workers, has_evaluator=not is_worker)
    assert run_job(job) == ExitCode.FAILED
    # Without all workers there is no job; without an evaluator there is.
    code = -signal.SIGKILL if is_worker else 0
    assert started["worker 0"].ended.result().returncode == code
    captured = capfd.readouterr()
    assert captured.out == ("" if is_worker else "[worker 0] trained\n")
    assert message in captured.err


@slow_after_first("stop", [None, signal.SIGTERM])
@slow_after_first("num_looks", range(5))
def test_no_failure_is_missed_whenever_a_worker_ends(monkeypatch, num_looks, stop):
    """Jobs whose workers end at moments that real workers seldom hit."""

    class Scripted(LaunchedProcess):
        def __init__(self, label, arguments, environment):
            super().__init__(label)
            is_first = label == "worker 0"
            self.stdout, self.stderr, self.line = (io.BytesIO() for _ in range(3))
            self._code = (77 if stop else 0) if is_first else 3
            self._wait(2 if is_first else num_looks)
            if stop and is_first:
                os.kill(os.getpid(), stop)

        def _wait(self, num_looks):
            if num_looks == 0:
                self._end(self._code)
            else:
                asyncio.get_running_loop().call_soon(self._wait, num_looks - 1)

        def kill(self):
            pass

        def send_signal(self, number):
            pass

    monkeypatch.setattr(_machines, "Child", Scripted)
    code = run_job(make_job([]))
    assert code is (ExitCode.TERMINATED if stop else ExitCode.FAILED)
