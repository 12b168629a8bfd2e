"""Tests of joining the processes of a job, as far as one process can show it."""

import copy
import os
import pickle
import re
import subprocess
import sys
import textwrap

import jax
import pytest

import armillary
from armillary.cluster import (
    CommunicationOptions,
    ExitCode,
    SimpleClusterResolver,
    _communication,
    _join,
)
from armillary.cluster._gloo import keep_gloo_on
from armillary.controller._stop_request import StopRequest
from armillary.errors import ClusterError
from armillary.launch._environment import find_addresses
from tests.patience import patience

TWO = SimpleClusterResolver({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "worker", 1)


def test_a_single_process_joins_nobody():
    assert _join.join_cluster(SimpleClusterResolver({})).is_alone
    assert _join.get_peers().is_alone


@pytest.mark.parametrize(
    ("option", "value"), [("implementation", "NCCL"), ("bytes_per_pack", 1024)]
)
def test_a_single_process_refuses_options_that_its_platform_cannot_follow(
    option, value
):
    options = CommunicationOptions(**{option: value})
    with pytest.raises(ValueError, match=f"`{option}` is .* only on gpu"):
        armillary.MultiWorkerMirroredStrategy(communication_options=options)
    with pytest.raises(ValueError, match=f"`{option}` is .* only on gpu"):
        armillary.ShardedStrategy(communication_options=options)


def test_a_single_process_takes_options_that_its_platform_can_follow(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    options = CommunicationOptions(implementation="RING", timeout_seconds=5)
    strategy = armillary.MultiWorkerMirroredStrategy(communication_options=options)
    assert strategy.peers.is_alone


def test_an_evaluator_takes_the_options_of_the_workers():
    cluster = {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}
    resolver = SimpleClusterResolver(cluster, "evaluator", 0)
    options = CommunicationOptions(implementation="NCCL")
    strategy = armillary.MultiWorkerMirroredStrategy(resolver, options)
    assert strategy.peers.is_alone


def test_packs_are_too_late_when_devices_have_been_used(monkeypatch):
    jax.devices()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ClusterError, match=r"`bytes_per_pack` is 1024, .* before"):
        _join.join_cluster(
            SimpleClusterResolver({}), CommunicationOptions(bytes_per_pack=1024)
        )


def test_a_single_process_sets_the_flags_before_its_devices_start(monkeypatch):
    name = "jax._src.xla_bridge.backends_are_initialized"
    monkeypatch.setattr(name, lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "")
    options = CommunicationOptions(timeout_seconds=7)
    assert _join.join_cluster(SimpleClusterResolver({}), options).is_alone
    assert os.environ["XLA_FLAGS"].split() == ["--xla_cpu_collective_timeout_seconds=7"]


LATE = CommunicationOptions(timeout_seconds=5)


@pytest.mark.parametrize(
    ("options", "is_joined", "message"),
    [
        (None, False, "after JAX's devices had been used"),
        # The program joined others itself.
        (None, True, "process 1 of 2, but .* process 0 of 1"),
        (LATE, True, r"is CommunicationOptions\(.*Remove the"),
    ],
)
def test_joining_late_or_another_job_is_an_error(
    monkeypatch, options, is_joined, message
):
    jax.devices()
    if is_joined:
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(ClusterError, match=message):
        _join.join_cluster(TWO, options)


def test_options_need_a_platform_that_is_known():
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    try:
        with pytest.raises(ClusterError, match="`jax_platforms` is None"):
            _join.join_cluster(TWO, LATE)
    finally:
        jax.config.update("jax_platforms", before)


def test_options_reach_xla_before_the_processes_join(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1  --xla_b")
    _communication.apply_options(CommunicationOptions(timeout_seconds=5))
    expected = "--xla_a=1 --xla_b --xla_cpu_collective_timeout_seconds=5"
    assert os.environ["XLA_FLAGS"].split() == expected.split()


def test_a_flag_that_xla_does_not_know_is_an_error_before_xla_reads_it(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    monkeypatch.setattr(_communication, "find_unknown_flags", list)
    with pytest.raises(ClusterError, match="flag `xla_cpu_collective_timeout_seconds`"):
        _communication.apply_options(CommunicationOptions(timeout_seconds=5))
    assert os.environ["XLA_FLAGS"] == "--xla_a=1"


ARGUMENTS = {
    "coordinator_address": "10.0.0.1:2222",
    "num_processes": 9,
    "process_id": 0,
}


@pytest.mark.parametrize(
    ("arguments", "missing", "names"),
    [
        (ARGUMENTS, [3, 7], ["Process 0 of 9", "process 3, process 7", ":2222"]),
        (ARGUMENTS, None, ["process 1, ", "process 5, and 3 more"]),
        ({**ARGUMENTS, "process_id": 4}, None, ["Process 4 of 9", "for process 0."]),
        ({}, None, ["JAX to find and join the other processes"]),
    ],
)
def test_a_long_wait_is_logged_once_with_the_missing_processes(
    monkeypatch, caplog, arguments, missing, names
):
    monkeypatch.setattr(_join.threading, "Timer", FakeTimer)
    with _join._logging_long_wait(arguments, 42.0) as note:
        if missing is not None:
            note([1, 2, 3, 4, 5])
            note(missing)
        FakeTimer.latest.function()
    (record,) = caplog.records
    for name in (*names, "at most 42 s" if arguments else "at most 72 s"):
        assert name in record.getMessage()


def test_a_job_that_is_complete_logs_no_wait(monkeypatch, caplog):
    monkeypatch.setattr(_join.threading, "Timer", FakeTimer)
    with _join._logging_long_wait(ARGUMENTS, 42.0) as note:
        note([])
        FakeTimer.latest.function()
    assert not caplog.records
    assert FakeTimer.latest.is_canceled


class FakeTimer:
    """A timer that the test fires."""

    latest: "FakeTimer"

    def __init__(self, seconds, function):
        self.function = function
        self.is_canceled = False
        FakeTimer.latest = self

    def start(self):
        pass

    def cancel(self):
        self.is_canceled = True


JOIN = """
    import armillary, sys, time
    from armillary.cluster import CommunicationOptions, SimpleClusterResolver, _join
    from armillary.lifeline import _ending
    _join._SILENT_SECONDS = 0.25
    _ending.tell = lambda *_: time.sleep(1)  # The main thread ends meanwhile.
    resolver = SimpleClusterResolver({"worker": sys.argv[1:]}, "worker", 0)
    options = CommunicationOptions(timeout_seconds=SECONDS)
    armillary.MultiWorkerMirroredStrategy(resolver, options)
"""


@pytest.mark.slow
def test_a_process_that_never_joins_is_named_where_it_is_waited_for(tmp_path):
    program = tmp_path / "train.py"
    seconds = round(patience(3))
    program.write_text(textwrap.dedent(JOIN).replace("=SECONDS", f"={seconds}"))
    command = [sys.executable, str(program), *find_addresses(3)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        _, output = process.communicate(timeout=patience(120))
    assert process.returncode == ExitCode.RESTART_REQUESTED, output
    place = r"at .*train.py:9 in <module>: armillary.MultiWorker"
    who = "ERROR: process 0 of 3: Process 1 of 3 has not joined "
    who += f"for {seconds} s, nor have 1"
    assert re.search(f"{who} others, while process 0 waits {place}", output), output
    assert output.count("Process 0 of 3 has waited for 0.25 s for process 1, ") == 1


LISTEN = """
    import os, pathlib, sys, jax
    from armillary.cluster import SimpleClusterResolver
    from armillary.cluster._join import _initialize

    resolver = SimpleClusterResolver({"worker": sys.argv[1:]}, "worker", 0)
    arguments = resolver.process_plan().initialize_arguments()
    _initialize({**arguments, "num_processes": 1})
    jax.devices()
    own = [os.readlink(path) for path in pathlib.Path("/proc/self/fd").iterdir()
           if path.exists()]
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                print(address.rpartition(":")[0][-8:])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="It reads /proc.")
def test_a_job_on_loopback_listens_nowhere_else():
    # Another address of loopback than the one that the machine's name may point to.
    ports = [address.rpartition(":")[2] for address in find_addresses(2)]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LISTEN)]
        + [f"127.0.0.2:{port}" for port in ports],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stderr
    # The coordination service and Gloo; 7F is 127.
    assert done.stdout.split() == ["0200007F"] * 2


def test_a_jax_that_hides_gloo_is_warned_of(monkeypatch, caplog):
    monkeypatch.delattr("jax._src.xla_bridge.make_cpu_client")
    with caplog.at_level("WARNING", "armillary"):
        keep_gloo_on("127.0.0.1")
    assert "So Gloo listens at the address to which the name" in caplog.text


def test_a_process_without_others_agrees_with_itself():
    peers = _join.get_peers()
    error = ValueError("no disk")

    assert (peers.index, peers.count) == (0, 1)
    assert peers.gather("a topic", "a value") == ["a value"]
    stop = StopRequest()
    stop.make("the disk is full")
    assert peers.boundary.exchange("a topic", stop._own_value) == [["the disk is full"]]
    assert peers.explain(error) is None
    with pytest.raises(ValueError, match="no disk"), peers.announcing_errors():
        raise error
    assert not peers.has_failed
    assert copy.deepcopy(peers) is pickle.loads(pickle.dumps(peers)) is peers
