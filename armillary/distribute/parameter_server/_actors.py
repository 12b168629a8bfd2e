"""The actors of a strategy: where Ray runs parameter servers and workers."""

import atexit
import os
import secrets
from typing import Any

from armillary._logging import logger
from armillary.cluster._ray import import_ray
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.distribute.parameter_server._node import (
    check_cluster,
    quiet_forks,
    start_head,
    use_one_machine,
)
from armillary.distribute.parameter_server._server import ParameterServer
from armillary.distribute.parameter_server._worker import Worker

_EMBEDDED_BYTES = 2**31
_LOOPBACK = "127.0.0.1"


def start_ray(resolver: ClusterResolver | None) -> None:
    """Joins or starts the Ray cluster of a program.

    A program that has called `ray.init` keeps its cluster, and `RAY_ADDRESS` names one
    to join. With a resolver, the chief starts one for all its tasks. Otherwise one
    starts on loopback, without a dashboard, that lives as long as this program.
    """
    # Before Ray is imported, which reads both.
    address = os.environ.get("RAY_ADDRESS")
    if resolver is None and not address and "RAY_AUTH_MODE" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = import_ray()
    if ray.is_initialized():
        return
    if resolver is not None:
        start_head(check_cluster(resolver)["chief"][0])
    elif address:
        ray.init(address=address)
    else:
        use_one_machine(is_local=True)
        with quiet_forks():
            ray.init(
                address="local",
                include_dashboard=False,
                logging_level="ERROR",
                object_store_memory=_EMBEDDED_BYTES,
                _node_ip_address=_LOOPBACK,
            )
        atexit.register(ray.shutdown)
        logger.info("ray | started on this machine, for as long as the program runs.")


def make_server(options: dict[str, Any]) -> Any:
    """Returns a new parameter server. One that is lost takes its variables with it."""
    actor = import_ray().remote(ParameterServer)
    return actor.options(**{"num_cpus": 0, "max_restarts": 0, **options}).remote()


def make_worker(
    index: int, num_workers: int, *, is_synchronous: bool, options: dict[str, Any]
) -> Any:
    """Returns a new worker. Ray restarts one that is lost, wherever there is room."""
    actor = import_ray().remote(Worker)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, **options}
    return actor.options(**options).remote(index, num_workers, is_synchronous)
