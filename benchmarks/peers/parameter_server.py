"""TensorFlow's `ParameterServerStrategy`: servers in processes of their own."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from typing import Any

from benchmarks.closures import STEP, check_calls
from benchmarks.peers._case import import_peer
from benchmarks.processes import REPOSITORY

_SERVER = "benchmarks.peers.parameter_server"


class TensorFlowContestant:
    """Each call reads all variables, and sends a gradient for each.

    As in TensorFlow's tutorial: `schedule` of a `tf.function` that calls
    `strategy.run`, with the optimizer applied in the replica.
    """

    facts: dict[str, Any]

    def setup(self, shapes: list[tuple[int, ...]], num_workers: int) -> None:
        """Starts workers and one server on loopback, and connects to them."""
        tf, keras = _import_tensorflow()
        ports = _find_ports(num_workers + 2)
        hosts = [f"localhost:{port}" for port in ports]
        cluster = {"chief": hosts[:1], "ps": hosts[1:2], "worker": hosts[2:]}
        self._servers = [
            subprocess.Popen(
                [sys.executable, "-m", _SERVER, json.dumps(cluster), job, str(index)],
                cwd=REPOSITORY,
            )
            for job in ("ps", "worker")
            for index in range(len(cluster[job]))
        ]
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster), rpc_layer="grpc"
        )
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        with strategy.scope():
            variables = [tf.Variable(tf.zeros(shape)) for shape in shapes]
            optimizer = keras.optimizers.legacy.SGD(1.0)

        @tf.function
        def step() -> None:
            def replica() -> None:
                gradients = [tf.maximum(v, 1.0) * STEP for v in variables]
                optimizer.apply_gradients(zip(gradients, variables, strict=True))

            strategy.run(replica)

        self._variables, self._step, self._num_calls = variables, step, 0
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.facts = {"num_ps": 1, "num_workers": num_workers}

    def run(self, num_calls: int) -> float:
        """Runs calls to their end; returns how many updates the variables have had."""
        for _ in range(num_calls):
            self._coordinator.schedule(self._step)
        self._coordinator.join()
        self._num_calls += num_calls
        return check_calls([v.numpy() for v in self._variables], self._num_calls)


def serve(cluster: dict[str, list[str]], job: str, index: int) -> None:
    """Runs a worker or the server, until its parent ends it."""
    tf, _ = _import_tensorflow()
    spec = tf.train.ClusterSpec(cluster)
    tf.distribute.Server(spec, job_name=job, task_index=index, protocol="grpc").join()


def _import_tensorflow() -> tuple[Any, Any]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return import_peer("tensorflow", "orbit"), import_peer("tf_keras", "orbit")


def _find_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
