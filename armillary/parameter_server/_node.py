"""Ray on the machines of a cluster: how the chief starts it, and how others join it."""

import atexit
import contextlib
import fcntl
import ipaddress
import itertools
import math
import os
import secrets
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from armillary._logging import ensure_visible, logger
from armillary._optional import import_ray
from armillary.cluster.resolvers._resolver import (
    ClusterResolver,
    TFConfigClusterResolver,
)
from armillary.cluster.resolvers._spec import plan_process, split_address
from armillary.errors import ClusterError

# With this variable, Ray listens only on loopback, and not on all interfaces.
_ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_LOOK_SECONDS = 1.0
_SAY_SECONDS = 30.0
# The chief counts as gone after this many connections in a row that fail.
_MAX_MISSES = 5
# A raylet may end by itself on a machine that is busy while it starts.
_MAX_STARTS = 5
_LOGS = "/tmp/ray/session_latest/logs"


class Server:
    """The program of a worker or of a parameter server (`tf.distribute.Server`).

    Every process of the cluster runs the same program. Workers and parameter servers
    call `join` at the beginning of it. `docs/advanced/parameter_server_cluster.md` has
    an example.

    Args:
        cluster_resolver: The source of this process's task; by default `TF_CONFIG`.

    Raises:
        ClusterError: If this process is neither a worker nor a parameter server, or
            the cluster has no chief.
    """

    def __init__(self, cluster_resolver: ClusterResolver | None = None) -> None:
        source = "cluster_resolver"
        if cluster_resolver is None:
            source = "TF_CONFIG"
            cluster_resolver = TFConfigClusterResolver()
        self._spec = check_cluster(cluster_resolver, source)
        task_type = cluster_resolver.task_type
        task_id = cluster_resolver.task_id
        if task_type not in {"worker", "ps"}:
            raise ClusterError(
                f"`{source}` says that this process is a {task_type}, but a "
                "`Server` is a worker or a ps. The chief makes a "
                "`ParameterServerStrategy`; an evaluator does not join the cluster, "
                "and reads checkpoints."
            )
        self._name = f"{task_type} {task_id}"
        self._resource = name_resource(task_type, task_id or 0)
        self._address = self._spec[task_type][task_id or 0]
        self._chief = self._spec["chief"][0]

    def join(self) -> None:
        """Takes part in the cluster until the chief has ended.

        The call waits for the chief as long as necessary, and logs that it waits. If
        Ray ends in this process while the chief still runs, Ray is started again.

        Raises:
            ClusterError: If Ray does not start in this process, or ends several times.
        """
        ensure_visible()
        self._wait_for_chief()
        problem: str | None = None
        for number in range(1, _MAX_STARTS + 1):
            problem = self._take_part()
            if problem is None:
                logger.info("%s | the chief has ended.", self._name)
                return
            logger.warning(
                "%s | %s (start %d of %d)", self._name, problem, number, _MAX_STARTS
            )
        raise ClusterError(
            f"{self._name} at {self._address} has started Ray {_MAX_STARTS} times "
            f"without success. {problem} A machine without free memory or processor "
            "time is the usual reason: start this process again, and look at Ray's "
            f"logs in {_LOGS}."
        )

    def _wait_for_chief(self) -> None:
        logged_at = -math.inf
        while not _answers(self._chief):
            if time.monotonic() - logged_at > _SAY_SECONDS:
                logged_at = time.monotonic()
                logger.info("%s | waits for the chief at %s.", self._name, self._chief)
            time.sleep(_LOOK_SECONDS)

    def _take_part(self) -> str | None:
        """Runs Ray until the chief has ended; returns the reason if Ray ends first."""
        logger.info("%s | joins the cluster of %s.", self._name, self._chief)
        host, _ = split_address(self._address)
        try:
            node = _start_node(
                host, gcs_address=self._chief, resources={self._resource: 1.0}
            )
        except Exception as error:
            # The chief may end while this task begins.
            is_over = self._chief_has_ended()
            return None if is_over else f"Ray did not start: {first_line(error)}"

        logger.info("%s | has joined the cluster of %s.", self._name, self._chief)
        try:
            return self._watch(node)
        finally:
            node.kill_all_processes(check_alive=False, allow_graceful=True)

    def _watch(self, node: Any) -> str | None:
        """Waits for the end of the chief; returns the reason if Ray ends first."""
        num_misses = 0
        while num_misses < _MAX_MISSES:
            dead = node.dead_processes()
            if dead:
                names = ", ".join(name for name, _ in dead)
                is_over = self._chief_has_ended()
                return None if is_over else f"A process of Ray has ended: {names}."
            time.sleep(_LOOK_SECONDS)
            num_misses = 0 if _answers(self._chief) else num_misses + 1
        return None

    def _chief_has_ended(self) -> bool:
        for _ in range(_MAX_MISSES):
            if _answers(self._chief):
                return False
            time.sleep(_LOOK_SECONDS)
        return True


def check_cluster(
    resolver: ClusterResolver, source: str = "cluster_resolver"
) -> dict[str, list[str]]:
    """Returns the addresses of the tasks of a cluster, by job.

    Args:
        resolver: The description of the cluster.
        source: Its name in messages.

    Raises:
        ClusterError: If the cluster lacks a job, or cannot train.
    """
    cluster_spec = resolver.cluster_spec()
    spec = cluster_spec.as_dict()
    for job in ("chief", "worker", "ps"):
        if not spec.get(job):
            raise ClusterError(
                f"`{source}` describes a cluster of {sorted(spec)}, without a "
                f"{job}. Asynchronous training needs one chief, workers, and parameter "
                "servers: name the addresses of all three jobs."
            )
    try:
        plan_process(cluster_spec, resolver.task_type, resolver.task_id)
    except ValueError as error:
        raise ClusterError(
            f"`{source}` describes a cluster that cannot train. {error}"
        ) from error
    return spec


def start_ray(resolver: ClusterResolver | None) -> None:
    """Joins the Ray cluster that the program or `RAY_ADDRESS` names, or starts one."""
    # ORDER: Ray reads both variables when it is imported.
    address = os.environ.get("RAY_ADDRESS")
    is_of_program = resolver is None and not address
    if is_of_program and "RAY_AUTH_MODE" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = import_ray()
    if ray.is_initialized():
        return
    if resolver is not None:
        _start_as_chief(resolver)
    elif address:
        ray.init(address=address)
    else:
        _start_here()


def _start_as_chief(resolver: ClusterResolver) -> None:
    """Starts the head of a cluster at the chief's address, where others join it."""
    ray = import_ray()
    address = check_cluster(resolver)["chief"][0]
    host, port = split_address(address)
    node = _start_head(host, port)
    atexit.register(node.kill_all_processes, check_alive=False, allow_graceful=True)
    with quiet_forks():
        ray.init(address=address, logging_level="ERROR")
    # Exit functions run in reverse order: the connection ends before the head.
    atexit.register(ray.shutdown)


def _start_here() -> None:
    """Starts Ray for this program alone, on this machine.

    Ray gives its own processes 30 seconds, which a busy machine may exceed. So a start
    that fails is tried again.
    """
    ray = import_ray()
    use_one_machine(is_local=True)
    for number in itertools.count(1):
        try:
            with quiet_forks():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    logging_level="ERROR",
                    object_store_memory=2**31,
                    _node_ip_address="127.0.0.1",
                )
            break
        except Exception as error:
            ray.shutdown()
            problem = first_line(error)
            if number == _MAX_STARTS:
                raise ClusterError(
                    f"Ray did not start on this machine in {_MAX_STARTS} attempts "
                    f"({problem}). Its logs are in {_LOGS}. A machine without free "
                    "memory or processor time is the usual reason."
                ) from error
        logger.warning(
            "ray | did not start: %s (start %d of %d)", problem, number, _MAX_STARTS
        )
    atexit.register(ray.shutdown)
    logger.info("ray | started on this machine, for as long as the program runs.")


def use_one_machine(*, is_local: bool) -> None:
    """Makes Ray listen on loopback only, or on all interfaces as it does by default."""
    if is_local:
        os.environ[_ONE_MACHINE] = "0"
    # Ray reads the variable when it is imported, and the program may have done that.
    constants = import_ray()._private.ray_constants
    constants.ENABLE_RAY_CLUSTER = not is_local


@contextlib.contextmanager
def quiet_forks() -> Iterator[None]:
    """Suppresses Python's warning about forks; Ray's forks only start programs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
        yield


def _start_head(host: str, port: int) -> Any:
    try:
        return _start_node(host, gcs_server_port=port)
    except Exception as error:
        raise ClusterError(
            f"Ray did not start in the process of chief 0 at {host}:{port} "
            f"({first_line(error)}). Its logs are in {_LOGS}. Another program at this "
            "port, or a machine without free memory or processor time, are the usual "
            "reasons: start all processes of the cluster again."
        ) from error


def _start_node(host: str, **options: Any) -> Any:
    address = socket.gethostbyname(host)
    use_one_machine(is_local=ipaddress.ip_address(address).is_loopback)
    ray = import_ray()
    params = ray._private.parameter.RayParams(
        node_ip_address=address,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        include_dashboard=False,
        **options,
    )
    # Ray chooses a free port, because one machine may have several tasks.
    params.dashboard_agent_listen_port = None
    is_head = "gcs_server_port" in options
    with quiet_forks(), _one_at_a_time():
        return ray._private.node.Node(params, head=is_head, shutdown_at_exit=True)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Starts the tasks of one machine one after the other.

    Ray chooses the names of sockets by the files that exist.
    """
    path = Path(tempfile.gettempdir(), f"armillary-ray-{os.getuid()}.lock")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def name_resource(job: str, index: int) -> str:
    """Returns the name of the resource that only the node of this task has."""
    return f"armillary_{job}_{index}"


def has_joined(job: str, index: int) -> bool:
    """Returns whether the node of a task is in the cluster and alive."""
    resource = name_resource(job, index)
    nodes = import_ray().nodes()
    return any(node["Alive"] and resource in node["Resources"] for node in nodes)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error, or its type if it has no text."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def _answers(address: str) -> bool:
    try:
        socket.create_connection(split_address(address), timeout=5).close()
    except OSError:
        return False
    return True
