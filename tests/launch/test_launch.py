"""Tests of the launcher with real processes of plain Python.

A fixture checks after each test that no process is left.
"""

import json
import signal
import time

import pytest

from armillary.launch import ExitCode
from tests.launch.conftest import is_running
from tests.patience import patience, wait_until
from tests.tiers import slow_after_first

DIE_ONCE = """
    print(os.environ["TF_CONFIG"], flush=True)
    mark(f"printed_{index}")
    if index == 1 and restarts == 0:
        for other in range(3):
            wait_for_mark(f"printed_{other}")
        os.kill(os.getpid(), signal.SIGKILL)
    if restarts == 0:
        time.sleep(300)
    print("ended", restarts, sys.argv[1:])
"""


def test_workers_run_the_script_as_python_does(launcher):
    code, stdout, stderr = launcher.run(
        """
        import multiprocessing, __main__
        def square(number):
            return number**2
        if __name__ == "__main__":
            assert __main__.square is square
            assert __main__.__file__.endswith("script.py")
            assert __main__.__spec__ is None
            assert sys.path[0] == os.getcwd()
            assert sys.stdin.read() == ""
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                assert pool.map(square, [3]) == [9]
            print(sys.argv[1:], json.loads(os.environ["TF_CONFIG"])["task"])
            print("to stderr", file=sys.stderr)
        """,
        "--workers 2",
        args=["--lr", "0.1"],
    )
    assert code == ExitCode.OK, stderr
    assert sorted(stdout.splitlines()) == [
        f"[worker {index}] ['--lr', '0.1'] {{'type': 'worker', 'index': {index}}}"
        for index in range(2)
    ]
    assert sorted(stderr.splitlines())[1:] == [
        f"[worker {index}] to stderr" for index in range(2)
    ]
    assert stderr.splitlines()[0].startswith("[launcher] starts 2 workers, coordinator")


@pytest.mark.slow
def test_long_output_arrives_whole_and_in_order(launcher):
    code, stdout, _ = launcher.run(
        "for i in range(3000): print(i, str(index) * 100)\n"
        "sys.stdout.write('no end'); sys.stdout.flush(); os._exit(0)\n",
        "--workers 3",
    )
    assert code == ExitCode.OK
    for index in range(3):
        prefix = f"[worker {index}] "
        lines = [line for line in stdout.splitlines() if line.startswith(prefix)]
        expected = [f"{prefix}{i} {str(index) * 100}" for i in range(3000)]
        assert lines == [*expected, f"{prefix}no end"]


@pytest.mark.slow
def test_a_traceback_is_the_scripts_own(launcher):
    code, _, stderr = launcher.run("raise RuntimeError('boom')\n")
    assert code == ExitCode.FAILED
    assert "frozen" not in stderr
    assert "execv" not in stderr
    end = stderr.splitlines()
    assert end[-1] == "[launcher] ends with exit code 1 (FAILED)."
    assert end[-2] == "[launcher]   | RuntimeError: boom"
    assert "[launcher] worker 0 of 1: exit code 1 after 0." in stderr


def test_a_dead_worker_restarts_the_whole_job(launcher):
    code, stdout, stderr = launcher.run(
        DIE_ONCE,
        "--workers 3 --max-restarts 2 --pause-seconds 0.1 --grace-seconds 0.2 "
        "--log-dir logs",
        args=["a"],
    )
    assert code == ExitCode.OK, stderr
    lines = [line for line in stdout.splitlines() if "ended" in line]
    assert sorted(lines) == [f"[worker {i}] ended 1 ['a']" for i in range(3)]
    assert "[launcher] worker 1 of 3 failed first: killed by SIGKILL after" in stderr
    assert "2 of 3 still run, and have 0.2 s to end by themselves." in stderr
    assert "[launcher] SIGTERM: sent to worker 0, 2, which still ran." in stderr
    assert "[launcher] restart 1 of 2 in 0.1 s." in stderr
    assert stderr.endswith("[launcher] ends with exit code 0 (OK) after 1 restart.\n")
    # Each attempt has other ports, and the same task.
    log = (launcher.folder / "logs" / "worker_2.log").read_text()
    first, second, last = log.splitlines()
    assert last == "ended 1 ['a']"
    first, second = json.loads(first), json.loads(second)
    assert first["task"] == second["task"]
    assert set(first["cluster"]["worker"]).isdisjoint(second["cluster"]["worker"])


@pytest.mark.slow
def test_the_first_cause_wins(launcher):
    code, _, stderr = launcher.run(
        """
        if index == 0:
            sys.exit(3)
        while not os.path.exists("pid_0_0"):
            time.sleep(0.01)
        while True:
            try:
                os.kill(int(open("pid_0_0").read()), 0)
                time.sleep(0.01)
            except ProcessLookupError:
                sys.exit(75)
        """,
        "--workers 3",
    )
    assert code == ExitCode.FAILED
    assert "worker 0 of 3 failed first: exit code 3 after" in stderr


def test_a_worker_that_others_report_as_stopped_is_killed_and_blamed(launcher):
    code, _, stderr = launcher.run(
        """
        from armillary._launcher import notify_launcher
        if index == 1:
            mark("ready")
            time.sleep(300)
        wait_for_mark("ready")
        notify_launcher("caused_by", 1)
        notify_launcher("stopped", 1)
        wait_for_end_of(1)
        sys.exit(75)
        """,
        "--workers 2 --grace-seconds 300",
    )
    assert code == ExitCode.RESTART_REQUESTED, stderr
    assert "SIGKILL: sent to worker 1, which does not answer" in stderr
    assert "worker 1 of 2 failed first: did not go on" in stderr


def test_the_worker_that_others_name_is_blamed_and_no_other(launcher):
    code, _, stderr = launcher.run(
        """
        from armillary._launcher import notify_launcher
        if index == 0:
            notify_launcher("caused_by", 2)
            sys.exit(3)
        wait_for_end_of(index - 1)
        sys.exit(3)
        """,
        "--workers 3 --grace-seconds 300",
    )
    assert code == ExitCode.FAILED, stderr
    assert "worker 2 of 3 failed first: exit code 3" in stderr


@pytest.mark.slow
def test_a_worker_that_ignores_everything_is_killed(launcher):
    code, _, stderr = launcher.run(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        mark(f"ready_{index}")
        while not (os.path.exists("ready_0") and os.path.exists("ready_1")):
            time.sleep(0.01)
        if index == 0:
            sys.exit(1)
        time.sleep(300)
        """,
        "--workers 2 --grace-seconds 0.1",
    )
    assert code == ExitCode.FAILED
    assert "SIGKILL: sent to worker 1, which still ran." in stderr


SAVE = """
    def save(number, frame):
        time.sleep(0.2)
        print("saved", signal.Signals(number).name)
        sys.exit(77)
    signal.signal(signal.SIGTERM, save)
"""


STUBBORN = """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""


READY = """
    mark(f"ready_{index}")
    time.sleep(300)
"""


@slow_after_first(
    ("script", "number", "code"),
    [
        (SAVE, signal.SIGTERM, ExitCode.PREEMPTED),
        ("", signal.SIGINT, ExitCode.INTERRUPTED),
        (STUBBORN, signal.SIGTERM, ExitCode.TERMINATED),
        ("os.kill(os.getpid(), signal.SIGSTOP)", signal.SIGTERM, ExitCode.TERMINATED),
    ],
)
def test_a_signal_ends_all_workers_and_those_that_can_save(
    launcher, script, number, code
):
    is_stopped = "SIGSTOP" in script
    is_killed = script == STUBBORN or is_stopped
    # A process that can save has the time for it, also on a busy machine.
    grace_seconds = 1 if is_killed else 300
    ready = f'mark(f"ready_{{index}}")\n{script}\n' if is_stopped else script + READY
    options = f"--workers 2 --max-restarts 3 --grace-seconds {grace_seconds}"
    launcher.start(ready, options)
    for index in range(2):
        launcher.wait_for_mark(f"ready_{index}")
    launcher.process.send_signal(number)
    found, stdout, stderr = launcher.finish()
    assert found == code, stderr
    saved = [f"[worker {i}] saved {number.name}" for i in range(2)]
    assert sorted(stdout.splitlines()) == (saved if script == SAVE else [])
    assert f"[launcher] {number.name}: passed on to worker 0, 1; SIGKILL in" in stderr
    assert ("SIGKILL: sent to worker 0, 1, which still ran." in stderr) == is_killed
    assert "restart" not in stderr
    end = f"[launcher] ends with exit code {code.value} ({code.name}).\n"
    assert stderr.endswith(end)


@pytest.mark.slow
def test_a_second_signal_kills_and_a_doubled_one_does_not(launcher):
    launcher.start(STUBBORN + READY, "--grace-seconds 300")
    launcher.wait_for_mark("ready_0")
    launcher.process.send_signal(signal.SIGINT)
    launcher.wait_for_line("SIGINT: passed on to worker 0;")
    launcher.process.send_signal(signal.SIGINT)
    time.sleep(patience(1.2))
    assert launcher.process.poll() is None
    launcher.process.send_signal(signal.SIGINT)
    code, _, stderr = launcher.finish()
    assert code == ExitCode.INTERRUPTED
    assert stderr.count("SIGINT again: ends all processes now.") == 1


@pytest.mark.slow
def test_a_signal_ends_the_pause_before_a_restart(launcher):
    launcher.start("sys.exit(1)\n", "--max-restarts 1 --pause-seconds 1e300")
    launcher.wait_for_mark("pid_0_0")
    launcher.wait_for_line("restart 1 of 1 in 1e+300 s.")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.finish()[0] == ExitCode.TERMINATED


@pytest.mark.slow
def test_user_signals_are_passed_on_and_end_nothing(launcher):
    launcher.start(
        """
        signal.signal(signal.SIGUSR1, lambda *_: mark("received"))
        mark("ready")
        while not os.path.exists("received"):
            time.sleep(0.01)
        """
    )
    launcher.wait_for_mark("ready")
    launcher.process.send_signal(signal.SIGUSR1)
    code, _, stderr = launcher.finish()
    assert code == ExitCode.OK
    assert "SIGUSR1: passed on to worker 0." in stderr


@pytest.mark.slow
def test_killing_the_launcher_kills_all_processes(launcher):
    launcher.start(STUBBORN + READY.replace("index", "name"), "--workers 2 --evaluator")
    pids = []
    for name in (0, 1, "evaluator"):
        launcher.wait_for_mark(f"ready_{name}")
        pids.append(int(launcher.wait_for_mark(f"pid_{name}_0")))
    assert all(is_running(pid) for pid in pids)
    launcher.process.kill()
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the processes' end")
    launcher.finish()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGABRT])
def test_a_launcher_that_a_signal_ends_with_a_core_leaves_no_grandchild(
    launcher, number
):
    launcher.start(
        """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        mark("child", child.pid)
        time.sleep(300)
        """
    )
    pid = int(launcher.wait_for_mark("child"))
    launcher.process.send_signal(number)
    assert launcher.finish()[0] == -number
    wait_until(lambda: not is_running(pid), "the grandchild's end")
