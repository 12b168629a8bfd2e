"""Tests of the evaluator of a job, with real processes of plain Python."""

import signal

import pytest

from armillary.launch import ExitCode


def test_an_evaluator_has_its_time_when_the_workers_have_ended(launcher):
    launcher.start(
        """
    if role == "evaluator":
        mark("ready")
        wait_for_mark("noticed")
        time.sleep(1.0)
        print("evaluated", os.environ["TF_CONFIG"].count("127.0.0.1:"))
    else:
        wait_for_mark("ready")
        print("trained")
    """,
        "--workers 2 --evaluator --grace-seconds 0.2 --log-dir logs",
    )
    launcher.wait_for_line("all workers have ended")
    launcher.mark("noticed")
    code, stdout, stderr = launcher.finish()
    assert code == ExitCode.OK, stderr
    *trained, evaluated = stdout.splitlines()
    assert sorted(trained) == [f"[worker {index}] trained" for index in range(2)]
    assert evaluated == "[evaluator] evaluated 2"
    first, *others = stderr.splitlines()
    assert first.startswith("[launcher] starts 2 workers, coordinator 127.0.0.1:")
    assert others == [
        "[launcher] starts the evaluator.",
        "[launcher] all workers have ended; waits for the evaluator.",
    ]
    assert (launcher.folder / "logs" / "evaluator.log").read_text() == "evaluated 2\n"
    assert (launcher.folder / "logs" / "worker_1.log").read_text() == "trained\n"


@pytest.mark.slow
def test_an_evaluator_that_fails_is_restarted_alone(launcher):
    code, stdout, stderr = launcher.run(
        """
    if role == "evaluator":
        if restarts == 0:
            sys.exit("no data")
        mark("restarted")
        wait_for_end_of_training()
        print("evaluated after", restarts)
    else:
        wait_for_mark("restarted")
        print("trained after", restarts)
    """,
        "--workers 2 --evaluator --max-restarts 1 --pause-seconds 0.1",
    )
    assert code == ExitCode.OK, stderr
    assert sorted(stdout.splitlines()) == [
        "[evaluator] evaluated after 1",
        "[worker 0] trained after 0",
        "[worker 1] trained after 0",
    ]
    assert "[launcher] evaluator: exit code 1 after" in stderr
    assert "[launcher]   | no data\n" in stderr
    assert "restart 1 of 1 of the evaluator alone in 0.1 s." in stderr
    assert stderr.count("[launcher] starts 2 workers") == 1


@pytest.mark.slow
def test_an_evaluator_that_keeps_failing_ends_no_worker(launcher):
    launcher.start(
        """
    if role == "evaluator":
        sys.exit(3)
    wait_for_mark("noticed")
    print("trained")
    """,
        "--workers 2 --evaluator --max-restarts 1 --pause-seconds 0",
    )
    launcher.wait_for_line("no restart of the evaluator alone")
    launcher.mark("noticed")
    code, stdout, stderr = launcher.finish()
    assert code == ExitCode.TOO_MANY_RESTARTS, stderr
    assert sorted(stdout.splitlines()) == [f"[worker {i}] trained" for i in range(2)]
    assert "no restart of the evaluator alone: the workers go on.\n" in stderr
    assert "waits for the evaluator" not in stderr
    assert "ends with exit code 76 (TOO_MANY_RESTARTS)." in stderr


@pytest.mark.slow
def test_an_evaluator_continues_while_the_workers_are_restarted(launcher):
    code, stdout, stderr = launcher.run(
        """
    if role == "evaluator":
        wait_for_mark("restarted")
        print("still there", restarts)
        wait_for_end_of_training(1)
        print("evaluated")
    elif restarts == 0:
        wait_for_mark("pid_evaluator_0")
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        mark("restarted")
        time.sleep(0.5)
    """,
        "--evaluator --max-restarts 1 --pause-seconds 0.1",
    )
    assert code == ExitCode.OK, stderr
    assert stdout.splitlines() == ["[evaluator] still there 0", "[evaluator] evaluated"]
    assert stderr.count("[launcher] starts the evaluator.") == 1
    assert stderr.count("[launcher] starts 1 worker,") == 2
    assert stderr.endswith("[launcher] ends with exit code 0 (OK) after 1 restart.\n")


@pytest.mark.slow
def test_an_evaluator_may_end_before_the_workers(launcher):
    code, stdout, stderr = launcher.run(
        """
    if role == "evaluator":
        sys.exit()
    wait_for_end_of("evaluator")
    time.sleep(0.2)
    print("trained")
    """,
        "--evaluator",
    )
    assert code == ExitCode.OK, stderr
    assert stdout == "[worker 0] trained\n"
    assert "starts the evaluator.\n" in stderr


@pytest.mark.slow
def test_an_evaluator_ends_with_a_job_that_failed(launcher):
    code, _, stderr = launcher.run(
        """
    if role == "evaluator":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
        mark("ready")
        time.sleep(300)
    wait_for_mark("ready")
    sys.exit(3)
    """,
        "--evaluator",
    )
    assert code == ExitCode.FAILED
    assert "[evaluator] asked to end\n" in stderr


@pytest.mark.slow
def test_a_signal_stops_the_evaluator_too_and_the_workers_say_how_it_ended(launcher):
    launcher.start(
        """
    if role == "worker":
        def save(number, frame):
            print("saved")
            sys.exit(77)
        signal.signal(signal.SIGTERM, save)
    mark(f"ready_{name}")
    time.sleep(300)
    """,
        "--workers 2 --evaluator --max-restarts 3",
    )
    for name in (0, 1, "evaluator"):
        launcher.wait_for_mark(f"ready_{name}")
    launcher.process.send_signal(signal.SIGTERM)
    code, stdout, stderr = launcher.finish()
    assert code == ExitCode.PREEMPTED, stderr
    assert sorted(stdout.splitlines()) == [f"[worker {i}] saved" for i in range(2)]
    assert "SIGTERM: passed on to the evaluator." in stderr
    assert "restart" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("handler", "number", "code"),
    [
        ("pass", signal.SIGHUP, ExitCode.TERMINATED),
        ("sys.exit(77)", signal.SIGTERM, ExitCode.PREEMPTED),
    ],
)
def test_a_signal_ends_the_last_evaluation(launcher, handler, number, code):
    # A process that exits has the time for it, also on a busy machine.
    grace_seconds = 0.5 if handler == "pass" else 300
    launcher.start(
        f"""
    if role == "evaluator":
        signal.signal(signal.SIGTERM, lambda *_: ({handler}))
        mark("ready")
        wait_for_end_of_training()
        mark("last")
        time.sleep(300)
    else:
        wait_for_mark("ready")
    """.replace("(pass)", "None"),
        f"--evaluator --grace-seconds {grace_seconds} --max-restarts 3",
    )
    launcher.wait_for_mark("last")
    launcher.wait_for_line("all workers have ended; waits for the evaluator.")
    launcher.process.send_signal(number)
    found, _, stderr = launcher.finish()
    assert found == code, stderr
    assert f"{number.name}: passed on to the evaluator." in stderr
    is_killed = "SIGKILL: sent to the evaluator, which still ran." in stderr
    assert is_killed == (handler == "pass")
    assert "restart" not in stderr
