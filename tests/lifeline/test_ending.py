"""Tests of how a process ends: its message, exit code and unfinished work."""

import subprocess
import sys
import textwrap

import pytest

from armillary.cluster import ExitCode
from tests.patience import patience


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )


def test_the_end_is_said_and_waits_for_work_in_the_background():
    ended = run("""
        import threading, time
        from armillary._process import Process, set_process
        from armillary.lifeline import _ending

        set_process(Process(1, 4))
        _ending._UNWIND_SECONDS = 0.2
        start = time.monotonic()
        _ending.finish_first(lambda: time.monotonic() < start + 1)
        thread = threading.Thread(target=_ending.end_process, args=("no more",))
        thread.start()
        print("said", end="")  # stays in a buffer until it is flushed
        time.sleep(10_000)
    """)
    assert ended.returncode == ExitCode.RESTART_REQUESTED
    assert ended.stderr == (
        "ERROR: process 1 of 4: no more\n"
        "process 1 of 4: ends with exit code 75 (RESTART_REQUESTED).\n"
    )
    assert ended.stdout == "said"


@pytest.mark.slow
def test_a_main_thread_that_has_ended_is_not_waited_for():
    # The limit of `run` is shorter than these waits.
    ended = run("""
        import atexit, threading, time
        atexit.register(lambda: time.sleep(10_000))  # what JAX does, if others are gone
        from armillary.lifeline import _ending

        _ending._UNWIND_SECONDS = 10_000
        _ending.notify_launcher = lambda *_: time.sleep(1)  # a slow launcher
        threading.Thread(
            target=_ending.end_process, args=("no more",), daemon=True
        ).start()
        time.sleep(0.5)
        raise ValueError("this reaches the user")
    """)
    assert ended.returncode == ExitCode.RESTART_REQUESTED
    assert "this reaches the user" in ended.stderr
    assert "no more" in ended.stderr


@pytest.mark.slow
def test_an_abort_waits_until_the_reason_is_printed():
    ended = run("""
        import ctypes, threading, time
        from armillary.lifeline import _ending

        _ending.delay_aborts()
        _ending._UNWIND_SECONDS = 0.2
        threading.Thread(target=ctypes.CDLL(None).abort, daemon=True).start()
        time.sleep(0.5)
        threading.Thread(target=_ending.end_process, args=("it is gone",)).start()
        time.sleep(10_000)
    """)
    assert ended.returncode == ExitCode.RESTART_REQUESTED
    assert "it is gone" in ended.stderr


@pytest.mark.slow
def test_an_abort_with_no_reason_still_ends_the_process():
    ended = run("""
        import os
        from armillary.lifeline import _ending

        _ending.delay_aborts()
        os.abort()
    """)
    assert ended.returncode == -6
