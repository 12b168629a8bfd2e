"""What an end of a process means, when a job is restarted, and its exit code."""

import signal

import pytest

from armillary._process import ExitCode
from armillary.launch._outcome import (
    MAX_PAUSE_SECONDS,
    Ending,
    RestartPolicy,
    find_stop_code,
    name_signal,
)

RESTARTABLE = (ExitCode.FAILED, ExitCode.RESTART_REQUESTED, ExitCode.PREEMPTED)


@pytest.mark.parametrize("cause", RESTARTABLE)
def test_without_restarts_the_first_cause_is_the_exit_code(cause):
    assert RestartPolicy(0, 1.0).find_exit_code(cause) is cause


@pytest.mark.parametrize("cause", RESTARTABLE)
def test_restarts_end_when_they_are_used_up(cause):
    policy = RestartPolicy(2, 0.0)
    for _ in range(2):
        assert policy.find_exit_code(cause) is None
        policy.begin_restart()
    assert policy.find_exit_code(cause) is ExitCode.TOO_MANY_RESTARTS


@pytest.mark.parametrize("cause", [ExitCode.OK, ExitCode.USAGE])
def test_what_a_restart_cannot_change_is_final(cause):
    assert RestartPolicy(5, 1.0).find_exit_code(cause) is cause


def test_pauses_double_up_to_a_bound():
    policy = RestartPolicy(2000, 10.0)
    assert [policy.begin_restart() for _ in range(5)] == [10, 20, 40, 60, 60]
    assert all(policy.begin_restart() == MAX_PAUSE_SECONDS for _ in range(1500))


def test_a_long_pause_stays_as_it_is():
    policy = RestartPolicy(3, 300.0)
    assert [policy.begin_restart() for _ in range(2)] == [300, 300]


@pytest.mark.parametrize(
    ("returncode", "cause", "text"),
    [
        (0, ExitCode.OK, "exit code 0 after 2.5 s"),
        (1, ExitCode.FAILED, "exit code 1 after 2.5 s"),
        (2, ExitCode.USAGE, "exit code 2 after 2.5 s"),
        (3, ExitCode.FAILED, "exit code 3 after 2.5 s"),
        (75, ExitCode.RESTART_REQUESTED, "exit code 75 (RESTART_REQUESTED) after"),
        (76, ExitCode.FAILED, "exit code 76 after"),
        (77, ExitCode.PREEMPTED, "exit code 77 (PREEMPTED) after"),
        (-9, ExitCode.FAILED, "killed by SIGKILL after 2.5 s"),
    ],
)
def test_an_ending_says_how_and_what_it_means(returncode, cause, text):
    ending = Ending(returncode=returncode, seconds=2.5)
    assert ending.cause is cause
    assert ending.describe().startswith(text)


def test_a_signal_without_a_name_has_a_number():
    assert name_signal(45) == "signal 45"


OK, SAVED, FAILED = ExitCode.OK, ExitCode.PREEMPTED, ExitCode.FAILED


@pytest.mark.parametrize(
    ("number", "causes", "code"),
    [
        (signal.SIGTERM, [OK, OK], ExitCode.OK),
        (signal.SIGTERM, [SAVED, OK], ExitCode.PREEMPTED),
        (signal.SIGINT, [SAVED, SAVED], ExitCode.PREEMPTED),
        (signal.SIGTERM, [SAVED, FAILED], ExitCode.TERMINATED),
        (signal.SIGHUP, [FAILED], ExitCode.TERMINATED),
        (signal.SIGINT, [FAILED, OK], ExitCode.INTERRUPTED),
        (signal.SIGINT, [], ExitCode.INTERRUPTED),
    ],
)
def test_a_stopped_job_says_whether_it_saved(number, causes, code):
    assert find_stop_code(number, causes) is code
