"""The strategy of asynchronous training, and the Ray cluster that it runs on."""

import atexit
import contextlib
import fcntl
import ipaddress
import os
import secrets
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from armillary._checks import (
    check_callable,
    check_instance,
    check_positive_int,
    check_seconds,
)
from armillary._logging import logger
from armillary._optional import import_ray
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.cluster.resolvers._spec import plan_process, split_address
from armillary.distribute.strategies._single import SingleStrategy
from armillary.errors import ClusterError
from armillary.typing import PyTree

# With it, Ray listens on loopback only, and not on all interfaces.
_ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_LOOK_SECONDS = 1.0
_SAY_SECONDS = 30.0
# After the chief was seen, it is gone when this many looks in a row find nobody.
_MOST_MISSES = 5


class ParameterServerStrategy(SingleStrategy):
    """Variables on parameter servers, steps on workers that do not wait for each other.

    As `tf.distribute.ParameterServerStrategy`, over Ray (extra `ray`). Functions are
    scheduled with a `ClusterCoordinator`; a `StandardTrainer` under this strategy does
    so itself. In this process, the coordinator, it is a strategy of one device: models
    are made, evaluated and saved here.

    Args:
        cluster_resolver: What names the chief, the workers and the parameter servers of
            a cluster, such as `armillary.cluster.TFConfigClusterResolver()`: each runs
            the same program (`armillary.distribute.coordinator.Server`). By default
            workers and servers are processes of this machine, or of the Ray cluster
            that `RAY_ADDRESS` names.
        variable_partitioner: Into how many parts variables are cut, along their first
            axis; by default each is whole on one server. Such as
            `armillary.distribute.partitioners.MinSizePartitioner`.
        num_workers: Number of workers, if no resolver tells.
        num_ps: Number of parameter servers, if no resolver tells.
        report_seconds: After how many seconds a call is reported that has not ended.
        worker_options: Options of Ray for the actors of workers, such as
            `{"num_gpus": 1}`.
        ps_options: Options of Ray for the actors of parameter servers.

    Attributes:
        num_workers: Number of workers.
        num_ps: Number of parameter servers.

    Raises:
        TypeError: If the resolver or the partitioner is something else.
        ValueError: If a number is out of range, or given beside a resolver.
        ClusterError: If the cluster lacks a job, or this process is not the chief.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        num_workers: int | None = None,
        num_ps: int | None = None,
        report_seconds: float = 30.0,
        worker_options: dict[str, Any] | None = None,
        ps_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        fix = 'Use a dictionary of options of Ray, such as `{"num_cpus": 1}`.'
        check_instance("worker_options", worker_options, dict | None, fix)
        check_instance("ps_options", ps_options, dict | None, fix)
        check_seconds("report_seconds", report_seconds, "Use a positive number.")
        if variable_partitioner is not None:
            check_callable("variable_partitioner", variable_partitioner)
        self._resolver = cluster_resolver
        if cluster_resolver is not None:
            fix = "Pass an `armillary.cluster.TFConfigClusterResolver()`."
            check_instance("cluster_resolver", cluster_resolver, ClusterResolver, fix)
            num_workers, num_ps = _count_tasks(cluster_resolver, num_workers, num_ps)
        self.num_workers = check_positive_int(
            "num_workers", 2 if num_workers is None else num_workers
        )
        self.num_ps = check_positive_int("num_ps", 1 if num_ps is None else num_ps)
        self.variable_partitioner = variable_partitioner
        self.report_seconds = report_seconds
        self._options = {"worker": worker_options or {}, "ps": ps_options or {}}
        # Typed loosely: the class is above this one.
        self.coordinator: Any = None

    def actor_options(self, job: str, index: int) -> dict[str, Any]:
        """Returns Ray's options of the actor of a task."""
        # A lost worker is started anew, wherever there is room; what a lost server held
        # is lost.
        first = {"num_cpus": 0, "max_restarts": -1 if job == "worker" else 0}
        options = {**first, **self._options[job]}
        if self._resolver is None:
            return options
        # As in `Server`: each task has a machine of its own.
        own = {f"armillary_{job}_{index}": 1.0}
        return {**options, "resources": {**options.get("resources", {}), **own}}

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that was given."""
        return self._resolver

    def _collect(self, value: PyTree) -> PyTree:
        from armillary.parameter_server._closures import RemoteValue

        if any(isinstance(leaf, RemoteValue) for leaf in jax.tree.leaves(value)):
            raise ValueError(
                "A strategy was given the `RemoteValue` of a scheduled call, whose "
                "result is on a worker. Fetch it first: `coordinator.fetch(values)`."
            )
        return super()._collect(value)

    def __repr__(self) -> str:
        return (
            f"ParameterServerStrategy({self.num_workers} workers, "
            f"{self.num_ps} parameter servers)"
        )


def _count_tasks(
    resolver: ClusterResolver, num_workers: int | None, num_ps: int | None
) -> tuple[int, int]:
    if num_workers is not None or num_ps is not None:
        raise ValueError(
            f"`num_workers` is {num_workers!r} and `num_ps` is {num_ps!r}, but "
            "`cluster_resolver` counts both. Leave them out."
        )
    spec = check_cluster(resolver)
    if resolver.task_type != "chief":
        raise ClusterError(
            f"`cluster_resolver` says that this process is a {resolver.task_type}, but "
            "the chief makes a `ParameterServerStrategy`. Workers and ps run "
            "`armillary.distribute.coordinator.Server(resolver).join()`; an evaluator "
            "makes a strategy of its own devices, and reads checkpoints."
        )
    return len(spec["worker"]), len(spec["ps"])


class Server:
    """The program of a worker or of a parameter server (`tf.distribute.Server`).

    Every process of the cluster runs the same program, whose workers and parameter
    servers `join` at its beginning; `docs/parameter_server.md` has an example.

    Args:
        cluster_resolver: What says which task this process is.

    Raises:
        ClusterError: If it is no worker and no parameter server, or the cluster has no
            chief.
    """

    def __init__(self, cluster_resolver: ClusterResolver) -> None:
        self._spec = check_cluster(cluster_resolver)
        task_type, task_id = cluster_resolver.task_type, cluster_resolver.task_id
        if task_type not in {"worker", "ps"}:
            raise ClusterError(
                f"`cluster_resolver` says that this process is a {task_type}, but a "
                "`Server` is a worker or a ps. The chief makes a "
                "`ParameterServerStrategy`; an evaluator joins nothing, and reads "
                "checkpoints."
            )
        self._name = f"{task_type} {task_id}"
        # As in `ParameterServerStrategy.actor_options`.
        self._resource = f"armillary_{task_type}_{task_id or 0}"
        self._address = self._spec[task_type][task_id or 0]
        self._chief = self._spec["chief"][0]

    def join(self) -> None:
        """Takes part in the cluster until the chief has ended.

        It waits for the chief as long as it takes, and says so.
        """
        said = time.monotonic()
        while not _answers(self._chief):
            if time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                logger.info("%s | waits for the chief at %s.", self._name, self._chief)
            time.sleep(_LOOK_SECONDS)
        try:
            self._take_part()
        except Exception:
            # It may end while this task begins.
            if _answers(self._chief):
                raise
        logger.info("%s | the chief has ended.", self._name)

    def _take_part(self) -> None:
        host, _ = split_address(self._address)
        resources = {self._resource: 1.0}
        node = _start_node(host, gcs_address=self._chief, resources=resources)
        logger.info("%s | has joined the cluster of %s.", self._name, self._chief)
        try:
            misses = 0
            while misses < _MOST_MISSES and not node.dead_processes():
                time.sleep(_LOOK_SECONDS)
                misses = 0 if _answers(self._chief) else misses + 1
        finally:
            node.kill_all_processes(check_alive=False, allow_graceful=True)


def check_cluster(resolver: ClusterResolver) -> dict[str, list[str]]:
    """Returns the addresses of the tasks of a cluster, by job."""
    cluster_spec = resolver.cluster_spec()
    spec = cluster_spec.as_dict()
    for job in ("chief", "worker", "ps"):
        if not spec.get(job):
            raise ClusterError(
                f"`cluster_resolver` describes a cluster of {sorted(spec)}, without a "
                f"{job}. Asynchronous training needs one chief, workers, and parameter "
                "servers: name the addresses of all three jobs."
            )
    try:
        plan_process(cluster_spec, resolver.task_type, resolver.task_id)
    except ValueError as error:
        raise ClusterError(
            f"`cluster_resolver` describes a cluster that cannot train. {error}"
        ) from error
    return spec


def start_ray(resolver: ClusterResolver | None) -> None:
    """Joins the Ray cluster that the program or `RAY_ADDRESS` names, or starts one."""
    # Before Ray is imported, which reads both.
    address = os.environ.get("RAY_ADDRESS")
    if resolver is None and not address and "RAY_AUTH_MODE" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = import_ray()
    if ray.is_initialized():
        return
    if resolver is not None:
        address = check_cluster(resolver)["chief"][0]
        host, port = split_address(address)
        node = _start_node(host, gcs_server_port=port)
        atexit.register(node.kill_all_processes, check_alive=False, allow_graceful=True)
        with quiet_forks():
            ray.init(address=address, logging_level="ERROR")
        atexit.register(ray.shutdown)
    elif address:
        ray.init(address=address)
    else:
        use_one_machine(is_local=True)
        with quiet_forks():
            ray.init(
                address="local",
                include_dashboard=False,
                logging_level="ERROR",
                object_store_memory=2**31,
                _node_ip_address="127.0.0.1",
            )
        atexit.register(ray.shutdown)
        logger.info("ray | started on this machine, for as long as the program runs.")


def use_one_machine(*, is_local: bool) -> None:
    """Has Ray listen on loopback only, or on all interfaces as it does by default."""
    if is_local:
        os.environ[_ONE_MACHINE] = "0"
    # It is read when Ray is imported, which the program may have done before.
    constants = import_ray()._private.ray_constants
    constants.ENABLE_RAY_CLUSTER = not is_local


@contextlib.contextmanager
def quiet_forks() -> Iterator[None]:
    """Leaves out Python's warning of forks: Ray runs other programs there at once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
        yield


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
    # A free port: there may be several tasks on one machine.
    params.dashboard_agent_listen_port = None
    is_head = "gcs_server_port" in options
    with quiet_forks(), _one_at_a_time():
        return ray._private.node.Node(params, head=is_head, shutdown_at_exit=True)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keeps tasks of one machine apart: Ray names their sockets by what is there."""
    path = Path(tempfile.gettempdir(), f"armillary-ray-{os.getuid()}.lock")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _answers(address: str) -> bool:
    try:
        socket.create_connection(split_address(address), timeout=5).close()
    except OSError:
        return False
    return True
