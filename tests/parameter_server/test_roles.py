"""Tests of a cluster that `TF_CONFIG` describes, with one program for all roles."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys

import pytest

import armillary
from armillary.cluster import SimpleClusterResolver
from armillary.distribute.coordinator import Server
from armillary.errors import ClusterError
from armillary.parameter_server import _node
from tests.mistakes import mistakes
from tests.patience import patience, wait_until

PROGRAM = """
import logging, sys
import jax.numpy as jnp
import armillary
from flax import nnx

logging.basicConfig(level=logging.INFO, format="%(message)s")
resolver = armillary.cluster.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    armillary.distribute.coordinator.Server(resolver).join()
    sys.exit()
strategy = armillary.ParameterServerStrategy()
coordinator = armillary.distribute.coordinator.ClusterCoordinator(strategy)
total = nnx.Variable(jnp.zeros(()))


def add(n):
    total[...] += n


for n in range(20):
    coordinator.schedule(add, (jnp.float32(n),))
coordinator.join()
print("total", total[...])
"""
CLUSTER = {"chief": ["h:1"], "worker": ["h:2", "h:3"], "ps": ["h:4"]}


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_chief_workers_and_servers_run_one_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cluster = {
        "chief": [f"127.0.0.1:{port}"],
        "worker": ["127.0.0.1:1", "127.0.0.1:2"],
        "ps": ["127.0.0.1:3"],
    }
    tasks = [("worker", 0), ("worker", 1), ("ps", 0), ("chief", 0)]
    logs = [tmp_path / f"{job}_{index}.log" for job, index in tasks]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for task, log in zip(tasks, logs, strict=True):
            if task == ("chief", 0):
                # A process that starts after the chief does not wait for it.
                wait_until(lambda: count(logs, "waits for the chief") == 3)
            processes.append(start_task(program, cluster, task, log))
        codes = [process.wait(timeout=patience(600)) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    *others, chief = [log.read_text() for log in logs]
    assert codes == [0, 0, 0, 0], (others, chief)
    assert "total 190.0" in chief, others
    # One worker can do all the work before the other one is there.
    assert "0 | has joined the cluster of" in "".join(others)
    assert all("0 | the chief" in each or "1 | the chief" in each for each in others)


def start_task(program, cluster, task, log):
    """Starts the program as one task of a cluster, with its output in a file."""
    job, index = task
    config = {"cluster": cluster, "task": {"type": job, "index": index}}
    environment = {
        **os.environ,
        "TF_CONFIG": json.dumps(config),
        "RAY_AUTH_TOKEN": "0" * 64,
    }
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, str(program)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def count(logs, text):
    """Returns how many files have a text."""
    return sum(log.exists() and text in log.read_text() for log in logs)


def resolve(task_type, cluster=CLUSTER):
    return SimpleClusterResolver(cluster, task_type=task_type, task_id=0)


@mistakes(
    {
        ClusterError: {
            "without a ps": lambda: armillary.ParameterServerStrategy(
                resolve("chief", {"chief": ["h:1"], "worker": ["h:2"]})
            ),
            "cannot train. `chief` has 2 tasks": lambda: (
                armillary.ParameterServerStrategy(
                    resolve("chief", {**CLUSTER, "chief": ["h:1", "h:5"]})
                )
            ),
            "without a chief": lambda: Server(
                resolve("worker", {"worker": ["h:1"], "ps": ["h:2"]})
            ),
            "this process is a worker, but the chief makes": lambda: (
                armillary.ParameterServerStrategy(resolve("worker"))
            ),
            "this process is a chief, but a `Server`": lambda: Server(resolve("chief")),
        },
    }
)
def test_wrong_clusters_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def set_tf_config(monkeypatch, task_type, cluster=CLUSTER):
    task = {"type": task_type, "index": 0}
    config = {"cluster": cluster, "task": task} if cluster else {"task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def test_the_strategy_reads_tf_config(monkeypatch, caplog):
    set_tf_config(monkeypatch, "chief")
    caplog.set_level(logging.INFO, "armillary")
    strategy = armillary.ParameterServerStrategy()
    assert (strategy.num_workers, strategy.num_ps) == (2, 1)
    assert strategy.cluster_resolver is not None
    assert strategy.cluster_resolver.task_type == "chief"
    assert strategy.name_task("worker", 1) == "worker 1 at h:3"
    assert "from TF_CONFIG: the chief of 2 workers and 1 parameter" in caplog.text


def test_a_process_alone_has_workers_of_this_machine(monkeypatch):
    """`TF_CONFIG` without a cluster describes one process."""
    for task_type in (None, "worker"):
        if task_type is not None:
            set_tf_config(monkeypatch, task_type, cluster=None)
        strategy = armillary.ParameterServerStrategy(num_workers=3, num_ps=2)
        assert (strategy.num_workers, strategy.num_ps) == (3, 2)
        assert strategy.cluster_resolver is None
        assert strategy.name_task("worker", 1) == "worker 1"


JOINS = r".*Server\(resolver\)\.join\(\)"
WORKERS_ONLY = {"worker": ["h:1", "h:2"]}


@pytest.mark.parametrize(
    ("task_type", "cluster", "message"),
    [
        ("worker", CLUSTER, f"says that this process is a worker, {JOINS}"),
        ("ps", CLUSTER, f"says that this process is a ps, {JOINS}"),
        (
            "evaluator",
            CLUSTER,
            "says .* is an evaluator, .* strategy of its own devices",
        ),
        ("evaluator", None, "says .* is an evaluator, .* strategy of its own devices"),
        ("worker", WORKERS_ONLY, r"describes .*\['worker'\], without a chief"),
    ],
)
def test_the_literal_line_leads_each_task_somewhere(
    monkeypatch, task_type, cluster, message
):
    set_tf_config(monkeypatch, task_type, cluster)
    with pytest.raises(ClusterError, match=f"^`TF_CONFIG` {message}"):
        armillary.ParameterServerStrategy()


def test_numbers_that_tf_config_counts_are_refused(monkeypatch):
    set_tf_config(monkeypatch, "chief")
    with pytest.raises(ValueError, match=r"`num_workers` is 4 .* `TF_CONFIG` counts"):
        armillary.ParameterServerStrategy(num_workers=4)


def test_a_server_reads_tf_config(monkeypatch):
    set_tf_config(monkeypatch, "chief")
    with pytest.raises(ClusterError, match="`TF_CONFIG` says that this process is a c"):
        Server()


def test_a_waiting_server_logs_a_line_immediately(monkeypatch, caplog):
    """Before, a worker was silent for as long as its chief was not there."""
    looks = iter([False, False, True])
    monkeypatch.setattr(_node, "_answers", lambda address: next(looks, False))
    monkeypatch.setattr(_node, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(Server, "_take_part", lambda self: None)
    caplog.set_level(logging.INFO, "armillary")
    Server(resolve("ps")).join()
    assert caplog.messages == [
        "ps 0 | waits for the chief at h:1.",
        "ps 0 | the chief has ended.",
    ]


HERE = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}


class Node:
    """A node of Ray, without Ray."""

    def __init__(self, dead):
        self.dead, self.is_stopped = dead, False

    def dead_processes(self):
        return self.dead

    def kill_all_processes(self, **options):
        self.is_stopped = True


@pytest.fixture
def starts(monkeypatch, caplog):
    """Returns what each start of a node gives: a node, or an error that it raises."""
    left = []

    def start(host, **options):
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(_node, "_start_node", start)
    monkeypatch.setattr(_node, "_LOOK_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "armillary")
    return left


TIMEOUT = RuntimeError("The current node timed out during startup.\nMore.")


def test_a_node_that_ends_is_started_again(monkeypatch, starts, caplog):
    """On a busy machine a raylet may end while it starts."""
    nodes = [Node([("raylet", None)]), Node([])]
    starts += [TIMEOUT, *nodes]
    # It lives while two nodes end, and then it is gone.
    looks = iter([True] * 3)
    monkeypatch.setattr(_node, "_answers", lambda address: next(looks, False))
    Server(resolve("worker", HERE)).join()
    assert starts == []
    assert all(node.is_stopped for node in nodes)
    assert (
        "Ray did not start: The current node timed out during startup. (start 1 of"
        in (caplog.text)
    )
    assert "worker 0 | A process of Ray has ended: raylet. (start 2 of" in caplog.text
    assert caplog.messages[-1] == "worker 0 | the chief has ended."


def test_a_node_that_never_starts_is_named(monkeypatch, starts):
    starts += [TIMEOUT] * _node._MAX_STARTS
    monkeypatch.setattr(_node, "_answers", lambda address: True)
    message = r"worker 0 at 127\.0\.0\.1:2 has started Ray .*The current node timed out"
    with pytest.raises(ClusterError, match=message):
        Server(resolve("worker", HERE)).join()


def test_a_node_that_ends_with_the_chief_is_no_problem(monkeypatch, starts, caplog):
    starts.append(Node([("raylet", None)]))
    looks = iter([True])
    monkeypatch.setattr(_node, "_answers", lambda address: next(looks, False))
    Server(resolve("ps", HERE)).join()
    assert caplog.messages[-1] == "ps 0 | the chief has ended."


def test_a_chief_whose_node_does_not_start_is_named(monkeypatch, starts):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    starts.append(TIMEOUT)
    message = r"process of chief 0 at 127\.0\.0\.1:1 \(The current node timed out"
    with pytest.raises(ClusterError, match=message):
        _node.start_ray(resolve("chief", HERE))


@pytest.fixture
def inits(monkeypatch):
    """Replaces `ray.init`: each call takes one result, and raises it if it can."""
    ray = pytest.importorskip("ray")
    results = []

    def init(**options):
        assert options["_node_ip_address"] == "127.0.0.1"
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(_node.atexit, "register", lambda fn: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return results


def test_ray_is_started_again_on_a_machine_that_is_busy(inits, caplog):
    caplog.set_level(logging.INFO, "armillary")
    inits += [TIMEOUT, TIMEOUT, None]

    _node.start_ray(None)

    assert inits == []
    assert "start 2 of 5" in caplog.messages[1]
    assert "started on this machine" in caplog.messages[2]


def test_ray_that_never_starts_is_an_error_with_its_reason(inits):
    inits += [TIMEOUT] * 5
    message = r"in 5 attempts \(The current node timed out.*Its logs are in /tmp/ray"
    with pytest.raises(ClusterError, match=message):
        _node.start_ray(None)


def test_a_resolver_counts_the_tasks():
    strategy = armillary.ParameterServerStrategy(resolve("chief"))
    assert repr(strategy) == "ParameterServerStrategy(2 workers, 1 parameter servers)"
    options = strategy.actor_options("ps", 0)
    assert options["resources"] == {"armillary_ps_0": 1.0}
