"""Tests of when the watchdog counts time, and of the processes it leaves alone."""

import gc
import math
import os
import subprocess
import sys
import threading

import pytest

from armillary.lifeline._watchdog import Idle, Watchdog, read_process_state


def make_idle(limit_seconds=5.0):
    idle = Idle()
    idle.restart(f"inf process 0 of 2\n{limit_seconds} process 1 of 2\n")
    return idle


def test_silence_counts_towards_the_limit():
    idle = make_idle()

    ticks = [idle.tick(1.0, is_stopped=False) for _ in range(6)]

    assert ticks == [False, False, False, False, True, True]
    assert idle.who == "process 1 of 2"


def test_time_counts_again_from_each_limit():
    idle = make_idle()
    idle.tick(2.0, is_stopped=False)
    idle.tick(2.0, is_stopped=False)

    idle.restart("5.0 process 1 of 2\n")

    assert not idle.tick(2.0, is_stopped=False)


@pytest.mark.parametrize(
    ("seconds", "is_stopped"),
    [
        pytest.param(1.0, True, id="the process is stopped"),
        pytest.param(600.0, False, id="the watchdog was, too"),
    ],
)
def test_time_in_which_a_process_cannot_run_does_not_count(seconds, is_stopped):
    idle = make_idle()

    assert not any(idle.tick(seconds, is_stopped=is_stopped) for _ in range(100))
    assert idle.seconds == 0


def test_without_a_limit_nothing_is_reached():
    assert not Idle().tick(1e9, is_stopped=False)


def test_the_state_is_read_of_the_right_process():
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=-1)
    try:
        assert read_process_state(child.pid)[0][0] in "RSD"
        assert read_process_state(child.pid)[1] == read_process_state(child.pid)[1]
    finally:
        child.communicate(b"\n")
    with pytest.raises(ProcessLookupError):
        read_process_state(child.pid)


def test_a_program_that_waits_for_its_children_does_not_wait_for_the_watchdog():
    program = (
        "import os\n"
        "from armillary.lifeline._watchdog import Watchdog\n"
        "watchdog = Watchdog()\n"
        "watchdog.set_limit(600.0, 'process 0 of 1')\n"
        "while True:\n"
        "    try:\n"
        "        os.wait()\n"
        "    except ChildProcessError:\n"
        "        break\n"
        "watchdog.set_limit(600.0, 'process 0 of 1')\n"
        "print('waited')\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert found.stdout == "waited\n"
    assert found.stderr == ""


def test_a_fork_leaves_the_watchdog_to_its_parent():
    watchdog = Watchdog()
    watchdog.set_limit(600.0, "process 0 of 1")
    pipe = watchdog._pipe
    assert pipe is not None

    watchdog.release_in_child()

    assert watchdog._pipe is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pipe)


def test_two_threads_start_one_watchdog(monkeypatch):
    watchdog, started = Watchdog(), []
    start = watchdog._start
    monkeypatch.setattr(watchdog, "_start", lambda: (started.append(1), start()))

    threads = [
        threading.Thread(target=watchdog.set_limit, args=(600.0, "process 0 of 1"))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(started) == 1
    watchdog.release_in_child()


def test_a_program_that_cannot_start_a_watchdog_continues(
    monkeypatch, tmp_path, caplog
):
    """As where the user may not execute the interpreter that runs the program."""
    python = tmp_path / "python"
    python.write_text("")
    monkeypatch.setattr(sys, "executable", str(python))
    gc.collect()  # Files of earlier tests must not close in between.
    before = os.listdir("/dev/fd")
    watchdog = Watchdog()

    watchdog.set_limit(600.0, "process 0 of 1")
    watchdog.set_limit(600.0, "process 0 of 1")
    watchdog.set_limit(math.inf, "process 0 of 1")

    (record,) = caplog.records
    assert f"{python} cannot be run (Permission denied)" in record.getMessage()
    assert len(os.listdir("/dev/fd")) == len(before)
