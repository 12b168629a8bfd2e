"""Tests of jobs on a Ray cluster of loopback nodes that die."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from armillary.launch import ExitCode
from tests.environment import DEVICE_COUNT_FLAG, REPOSITORY
from tests.launch.conftest import is_running
from tests.patience import patience, wait_until

pytest.importorskip("ray")
# One cluster serves them all.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
]

DEADLINE = 300.0
SLEEP = "mark(f'ready_{index}')\ntime.sleep(300)\n"
SAVE = """
def save(number, frame):
    print("saved", signal.Signals(number).name)
    sys.exit(77)
signal.signal(signal.SIGTERM, save)
"""


class Machines:
    """Nodes of a cluster, with room for one worker each."""

    def __init__(self):
        self.count = 0
        environment = {
            # Ray listens on loopback alone, and writes no token into a home.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.environment = environment
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ray_cluster.py"))],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._process.stdout.readline().strip()

    def set_count(self, count):
        """Adds nodes, or kills some without a word to the others."""
        while self.count != count:
            is_more = count > self.count
            self._process.stdin.write("add\n" if is_more else "lose\n")
            self._process.stdin.flush()
            assert self._process.stdout.readline() == "done\n"
            self.count += 1 if is_more else -1

    def close(self):
        self._process.communicate(timeout=patience(DEADLINE))


@pytest.fixture(scope="module")
def machines():
    machines = Machines()
    yield machines
    machines.close()


@pytest.fixture
def start(launcher, machines):
    """Returns a function that starts a launcher, by default on two machines."""
    machines.set_count(2)

    def start(script, options, **others):
        options = f"--ray {machines.address} --pause-seconds 0.1 {options}"
        return launcher.start(script, options, **machines.environment, **others)

    yield start
    if launcher._process is not None and launcher.process.poll() is None:
        launcher.process.kill()
    # The kernel and Ray end what a launcher has left.
    wait_until(lambda: not launcher.find_running(), "the end of all workers")


def test_workers_run_as_they_do_on_one_machine(start):
    launcher = start(
        """
        print(os.environ["TF_CONFIG"], sys.argv[1:], os.getcwd(), os.environ["MINE"])
        print("to stderr", file=sys.stderr)
        sys.exit(index)
        """,
        f"--workers 2 --max-restarts 1 --log-dir logs --grace-seconds {patience(10):g}",
        args=["--lr", "0.1"],
        MINE="my own",
    )
    code, stdout, stderr = launcher.finish()
    assert code == ExitCode.TOO_MANY_RESTARTS, stderr
    lines = [line for line in stdout.splitlines() if line.startswith("[worker 1] {")]
    assert len(lines) == 2
    configs = []
    for line in lines:
        text = line.removeprefix("[worker 1] ")
        config, end = json.JSONDecoder().raw_decode(text)
        configs.append(config)
        assert text[end:] == f" ['--lr', '0.1'] {launcher.folder} my own"
        assert config["task"] == {"type": "worker", "index": 1}
        hosts = [address.partition(":")[0] for address in config["cluster"]["worker"]]
        assert hosts == ["127.0.0.1", "127.0.0.1"]
    assert "[launcher] worker 1 of 2 failed first: exit code 1 after" in stderr
    assert "Its stderr ended with:\n[launcher]   | to stderr\n" in stderr
    assert "[launcher] restart 1 of 1 in 0.1 s." in stderr
    log = launcher.folder / "logs" / "worker_0.log"
    assert log.read_text().splitlines().count("to stderr") == 2


def test_a_signal_lets_workers_save_and_the_launchers_death_ends_them(start):
    launcher = start(SAVE + SLEEP, "--workers 2 --max-restarts 3")
    for index in range(2):
        launcher.wait_for_mark(f"ready_{index}")
    launcher.process.send_signal(signal.SIGTERM)
    code, stdout, stderr = launcher.finish()
    assert code == ExitCode.PREEMPTED, stderr
    assert sorted(stdout.splitlines()) == [
        f"[worker {i}] saved SIGTERM" for i in (0, 1)
    ]
    assert "[launcher] SIGTERM: passed on to worker 0, 1; SIGKILL in 30 s" in stderr

    for path in launcher.folder.glob("ready*"):
        path.unlink()
    start(SLEEP, "--workers 2")
    for index in range(2):
        launcher.wait_for_mark(f"ready_{index}")
    pids = [int(launcher.wait_for_mark(f"pid_{index}_0")) for index in range(2)]
    assert all(is_running(pid) for pid in pids)
    launcher.process.kill()
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the workers' end")
    launcher.finish()


def test_more_workers_than_there_is_room_for_are_waited_for(start, machines):
    launcher = start("print('started')\n", "--workers 3")
    launcher.wait_for_line(
        "waits for room for 3 workers with 1 CPU each: the whole cluster has "
        "room for 2."
    )
    machines.set_count(3)
    code, stdout, stderr = launcher.finish()
    assert code == ExitCode.OK, stderr
    assert sorted(stdout.splitlines()) == [f"[worker {i}] started" for i in range(3)]

    start("print('started')\n", "--workers 9")
    launcher.wait_for_line("waits for room for 9 workers")
    launcher.process.send_signal(signal.SIGINT)
    code, stdout, stderr = launcher.finish()
    assert code == ExitCode.INTERRUPTED, stderr
    assert stdout == ""


TRAIN = """
import pathlib
import armillary
from tests.checkpoint.soak_program import train

def report(step):
    mark(f"step_{index}_{restarts}", step)
    if restarts < 2 and step >= 12 + 4 * restarts:
        time.sleep(300)

strategy = armillary.MultiWorkerMirroredStrategy()
mark(f"replicas_{restarts}", strategy.num_replicas_in_sync)
final = train(strategy, pathlib.Path("run"), 26, report)
mark(f"final_{index}", json.dumps(final["seen"]))
"""


# On machines of the launcher's own, `tests/recovery/test_policy.py` does the same.
@pytest.mark.parametrize(("fewest", "most"), [(1, 2), (2, 3)])
def test_a_job_shrinks_and_grows_and_reads_each_example_once(
    start, machines, fewest, most
):
    machines.set_count(most)
    launcher = start(
        TRAIN,
        f"--workers {fewest}:{most} --devices-per-worker 1 --max-restarts 3 "
        f"--grace-seconds {patience(20):g}",
        PYTHONPATH=str(REPOSITORY),
        XLA_FLAGS=f"{DEVICE_COUNT_FLAG}=1",
    )

    def wait_for_step(step, attempt):
        def has_come():
            if (launcher.folder / f"pid_0_{attempt + 1}").exists():
                launcher.process.send_signal(signal.SIGTERM)
                pytest.fail(f"Attempt {attempt} was lost: {launcher.finish()}")
            with contextlib.suppress(FileNotFoundError):
                path = launcher.folder / f"step_0_{attempt}"
                return int(path.read_text()) >= step

        wait_until(has_come, f"step {step} of attempt {attempt}", DEADLINE)

    wait_for_step(12, attempt=0)
    machines.set_count(fewest)
    wait_for_step(16, attempt=1)
    machines.set_count(most)
    os.kill(int(launcher.wait_for_mark("pid_0_1")), signal.SIGKILL)
    code, stdout, stderr = launcher.finish()
    assert code == ExitCode.OK, stderr
    replicas = [launcher.wait_for_mark(f"replicas_{attempt}") for attempt in range(3)]
    assert replicas == [str(most), str(fewest), str(most)]
    # Another worker may notice the loss of the machine before Ray does.
    assert "lost after" in stderr or "(RESTART_REQUESTED) after" in stderr
    assert "Raylet" not in stdout
    assert f"worker 0 of {fewest}" in stderr
    for index in range(most):
        seen = json.loads(launcher.wait_for_mark(f"final_{index}"))
        ids = [number for step in seen for number in step if number >= 0]
        assert len(ids) == 4 * 78
        for epoch in range(4):
            assert sorted(ids[epoch * 78 :][:78]) == list(range(78))
