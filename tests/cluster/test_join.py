"""Joining the processes of a job, as far as one process shows it."""

import os
import subprocess
import sys
import textwrap

import jax
import pytest

from armillary.cluster import (
    CommunicationImplementation,
    CommunicationOptions,
    SimpleClusterResolver,
    _join,
)
from armillary.cluster._join import keep_gloo_on
from armillary.errors import ClusterError
from armillary.launch._environment import find_addresses

TWO = SimpleClusterResolver({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "worker", 1)


def test_a_single_process_joins_nobody():
    assert _join.join_cluster(SimpleClusterResolver({})) is None
    assert _join.get_peers() is None


def test_joining_after_a_device_was_used_is_an_error():
    jax.devices()
    with pytest.raises(ClusterError, match="after JAX's devices had been used"):
        _join.join_cluster(TWO)


def test_a_program_that_joined_others_itself_must_have_joined_the_same(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(ClusterError, match=r"process 1 of 2, but .* process 0 of 1"):
        _join.join_cluster(TWO)


def test_options_that_come_after_the_processes_joined_are_an_error(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    options = CommunicationOptions(timeout_seconds=5)
    with pytest.raises(ClusterError, match=r"is CommunicationOptions\(.*Leave the"):
        _join.join_cluster(TWO, options)


def test_options_need_a_platform_that_is_known():
    options = CommunicationOptions(timeout_seconds=5)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    try:
        with pytest.raises(ClusterError, match="`jax_platforms` is None"):
            _join.join_cluster(TWO, options)
    finally:
        jax.config.update("jax_platforms", before)


def test_options_reach_xla_before_the_processes_join(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1  --xla_b")
    options = CommunicationOptions(
        timeout_seconds=5, implementation=CommunicationImplementation.RING
    )
    _join._apply(options)
    expected = "--xla_a=1 --xla_b --xla_cpu_collective_timeout_seconds=5"
    assert os.environ["XLA_FLAGS"] == expected
    assert jax.config.jax_cpu_collectives_implementation == "gloo"


def test_a_flag_with_another_value_is_an_error(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_timeout_seconds=9")
    message = "`XLA_FLAGS` sets `--xla_cpu_collective_timeout_seconds=9`, but"
    with pytest.raises(ValueError, match=message):
        _join._apply(CommunicationOptions(timeout_seconds=5))


def test_options_that_a_platform_cannot_follow_are_refused():
    options = CommunicationOptions(bytes_per_pack=1000)
    with pytest.raises(ValueError, match="`bytes_per_pack` is 1000"):
        _join.join_cluster(TWO, options)


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
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # The coordination service and Gloo; 7F is 127.
    assert done.stdout.split() == ["0200007F"] * 2


def test_a_jax_that_hides_gloo_is_warned_of(monkeypatch, caplog):
    monkeypatch.delattr("jax._src.xla_bridge.make_cpu_client")
    with caplog.at_level("WARNING", "armillary"):
        keep_gloo_on("127.0.0.1")
    assert "Gloo listens where the name of this machine points to" in caplog.text


def test_processes_must_agree_on_their_number(monkeypatch):
    monkeypatch.setattr(_join, "_initialize", lambda arguments: None)
    message = "this is process 1 of 2, but JAX was started as process 0 of 1"
    with pytest.raises(ClusterError, match=message):
        _join.join_cluster(TWO)
