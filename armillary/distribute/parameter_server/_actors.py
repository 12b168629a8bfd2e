"""The actors of a strategy: where Ray runs parameter servers and workers."""

import atexit
import logging
import os
import secrets
import warnings
from typing import Any

from armillary._logging import logger
from armillary.cluster._ray import import_ray
from armillary.distribute.parameter_server._server import ParameterServer
from armillary.distribute.parameter_server._worker import Worker

_EMBEDDED_BYTES = 2**31
_LOOPBACK = "127.0.0.1"
# With it, Ray listens on loopback only, and not on all interfaces.
_ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def start_ray() -> None:
    """Joins the Ray cluster that the environment names, or starts one on loopback.

    A program that has called `ray.init` keeps its cluster. `RAY_ADDRESS` names one to
    join. Otherwise a cluster starts that lives as long as this program, without a
    dashboard.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        os.environ.setdefault(_ONE_MACHINE, "0")
        if "RAY_AUTH_MODE" not in os.environ:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = import_ray()
    if ray.is_initialized():
        return
    # It is read when Ray is imported, which the program may have done before.
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = bool(address)
    if address:
        ray.init(address=address, log_to_driver=True)
        return
    with warnings.catch_warnings():
        # Ray forks, and runs other programs there at once, which is safe.
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
        ray.init(
            address="local",
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=True,
            object_store_memory=_EMBEDDED_BYTES,
            _node_ip_address=_LOOPBACK,
        )
    atexit.register(ray.shutdown)
    logger.info("ray | started on this machine, for as long as this program runs.")


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
