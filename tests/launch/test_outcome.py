"""What an end of a process means, when a job is restarted, and its exit code."""

import re
import signal
from pathlib import Path

import pytest

import armillary
from armillary.launch import ExitCode
from armillary.launch._process import Ending, name_signal
from armillary.launch._supervisor import (
    MAX_PAUSE_SECONDS,
    RestartPolicy,
    find_stop_code,
)

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "launch.md"
OK, SAVED, FAILED = ExitCode.OK, ExitCode.PREEMPTED, ExitCode.FAILED


def test_the_documentation_lists_every_exit_code():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert rows == [(str(code.value), code.name) for code in ExitCode]
    assert armillary.cluster.ExitCode is ExitCode


@pytest.mark.parametrize("cause", [FAILED, ExitCode.RESTART_REQUESTED, SAVED])
def test_restarts_end_when_they_are_used_up(cause):
    assert RestartPolicy(0, 1.0).find_exit_code(cause) is cause
    policy = RestartPolicy(2, 0.0)
    for _ in range(2):
        assert policy.find_exit_code(cause) is None
        policy.begin_restart()
    assert policy.find_exit_code(cause) is ExitCode.TOO_MANY_RESTARTS


@pytest.mark.parametrize("cause", [OK, ExitCode.USAGE])
def test_what_a_restart_cannot_change_is_final(cause):
    assert RestartPolicy(5, 1.0).find_exit_code(cause) is cause


def test_pauses_double_up_to_a_bound_and_a_long_one_stays_as_it_is():
    policy = RestartPolicy(2000, 10.0)
    assert [policy.begin_restart() for _ in range(5)] == [10, 20, 40, 60, 60]
    assert all(policy.begin_restart() == MAX_PAUSE_SECONDS for _ in range(1500))
    policy = RestartPolicy(3, 300.0)
    assert [policy.begin_restart() for _ in range(2)] == [300, 300]


@pytest.mark.parametrize(
    ("returncode", "loss", "cause", "text"),
    [
        (0, "", OK, "exit code 0 after 2.5 s"),
        (1, "", FAILED, "exit code 1 after 2.5 s"),
        (2, "", ExitCode.USAGE, "exit code 2 after 2.5 s"),
        (3, "", FAILED, "exit code 3 after 2.5 s"),
        (75, "", ExitCode.RESTART_REQUESTED, "exit code 75 (RESTART_REQUESTED) after"),
        (76, "", FAILED, "exit code 76 after"),
        (77, "", SAVED, "exit code 77 (PREEMPTED) after"),
        (-9, "", FAILED, "killed by SIGKILL after 2.5 s"),
        (-9, "on vm: no answer.", FAILED, "lost after 2.5 s, on vm: no answer"),
    ],
)
def test_an_ending_says_how_and_what_it_means(returncode, loss, cause, text):
    ending = Ending(returncode=returncode, seconds=2.5, loss=loss)
    assert ending.cause is cause
    assert ending.is_reaction == (returncode in (75, 77))
    assert str(ending).startswith(text)
    assert not str(ending).endswith(".")


def test_a_signal_without_a_name_has_a_number():
    assert name_signal(45) == "signal 45"


@pytest.mark.parametrize(
    ("number", "causes", "code"),
    [
        (signal.SIGTERM, [OK, OK], OK),
        (signal.SIGTERM, [SAVED, OK], SAVED),
        (signal.SIGINT, [SAVED, SAVED], SAVED),
        (signal.SIGTERM, [SAVED, FAILED], ExitCode.TERMINATED),
        (signal.SIGHUP, [FAILED], ExitCode.TERMINATED),
        (signal.SIGINT, [FAILED, OK], ExitCode.INTERRUPTED),
        (signal.SIGINT, [], ExitCode.INTERRUPTED),
    ],
)
def test_a_stopped_job_says_whether_it_saved(number, causes, code):
    assert find_stop_code(number, causes) is code
