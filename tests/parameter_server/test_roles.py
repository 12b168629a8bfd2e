"""A cluster that `TF_CONFIG` describes: one program, which each process runs."""

import json
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
from tests.mistakes import mistakes
from tests.patience import patience

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
strategy = armillary.ParameterServerStrategy(resolver)
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
    processes = []
    for job, index in tasks:
        config = {"cluster": cluster, "task": {"type": job, "index": index}}
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps(config),
            "RAY_AUTH_TOKEN": "0" * 64,
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(program)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    try:
        outputs = [
            process.communicate(timeout=patience(300))[0] for process in processes
        ]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    *others, chief = outputs
    assert "total 190.0" in chief, outputs
    # One worker can do all the work before the other one is there.
    assert "0 | has joined the cluster of" in "".join(others)
    assert all("0 | the chief" in each or "1 | the chief" in each for each in others)
    assert [process.returncode for process in processes] == [0, 0, 0, 0], chief


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


def test_a_resolver_counts_the_tasks():
    strategy = armillary.ParameterServerStrategy(resolve("chief"))
    assert repr(strategy) == "ParameterServerStrategy(2 workers, 1 parameter servers)"
    options = strategy.actor_options("ps", 0)
    assert options["resources"] == {"armillary_ps_0": 1.0}
