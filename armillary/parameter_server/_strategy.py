"""The strategy of asynchronous training.

How many workers and servers there are, and how calls are given to them.

The actors of a strategy: where Ray runs parameter servers and workers.
"""

import atexit
import inspect
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from armillary._checks import (
    check_callable,
    check_instance,
    check_not_negative_int,
    check_positive_int,
    check_seconds,
)
from armillary._logging import logger
from armillary._optional import import_ray
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.data._dataset import DistributedDataset
from armillary.data._layout import InputContext, InputOptions
from armillary.distribute.strategies._single import SingleStrategy
from armillary.errors import ClusterError
from armillary.parameter_server._node import (
    check_cluster,
    quiet_forks,
    start_head,
    use_one_machine,
)
from armillary.parameter_server._server import ParameterServer
from armillary.parameter_server._worker import Worker


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How calls are given out.

    Attributes:
        num_workers: Number of workers.
        num_ps: Number of parameter servers.
        max_staleness: Most updates between a call's reading and its writing; `None` for
            any number, 0 to make the calls of all workers one update.
        report_seconds: After how long a call is reported that has not ended.
        worker_options: Ray's options of worker actors.
        ps_options: Ray's options of parameter-server actors.
        has_cluster: Whether each task has a machine of its own, named by a resource.
    """

    num_workers: int
    num_ps: int
    max_staleness: int | None
    report_seconds: float
    worker_options: dict[str, Any]
    ps_options: dict[str, Any]
    has_cluster: bool = False

    def options_of(self, job: str, index: int) -> dict[str, Any]:
        """Returns Ray's options of the actor of a task."""
        options = self.worker_options if job == "worker" else self.ps_options
        if not self.has_cluster:
            return options
        own = {f"armillary_{job}_{index}": 1.0}
        return {**options, "resources": {**options.get("resources", {}), **own}}

    @property
    def is_synchronous(self) -> bool:
        """Whether calls run in rounds, one on each worker."""
        return self.max_staleness == 0


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
        max_staleness: Most updates that others make between a call's reading and its
            writing. By default any number. With 0, the calls of all workers make one
            update, as the replicas of `MirroredStrategy` do.
        report_seconds: After how many seconds a call is reported that has not ended.
        worker_options: Options of Ray for the actors of workers, such as
            `{"num_gpus": 1}`.
        ps_options: Options of Ray for the actors of parameter servers.

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
        max_staleness: int | None = None,
        report_seconds: float = 30.0,
        worker_options: dict[str, Any] | None = None,
        ps_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if variable_partitioner is not None:
            _check_partitioner(variable_partitioner)
        if max_staleness is not None:
            check_not_negative_int("max_staleness", max_staleness)
        fix = 'Use a dictionary of options of Ray, such as `{"num_cpus": 1}`.'
        check_instance("worker_options", worker_options, dict | None, fix)
        check_instance("ps_options", ps_options, dict | None, fix)
        check_seconds("report_seconds", report_seconds, "Use a positive number.")
        self._resolver = cluster_resolver
        if cluster_resolver is not None:
            fix = "Pass an `armillary.cluster.TFConfigClusterResolver()`."
            check_instance("cluster_resolver", cluster_resolver, ClusterResolver, fix)
            num_workers, num_ps = _count_tasks(cluster_resolver, num_workers, num_ps)
        self.variable_partitioner = variable_partitioner
        self.settings = Settings(
            num_workers=check_positive_int(
                "num_workers", 2 if num_workers is None else num_workers
            ),
            num_ps=check_positive_int("num_ps", 1 if num_ps is None else num_ps),
            max_staleness=max_staleness,
            report_seconds=report_seconds,
            worker_options=dict(worker_options or {}),
            ps_options=dict(ps_options or {}),
            has_cluster=cluster_resolver is not None,
        )
        # Typed loosely: the class is above this one.
        self.coordinator: Any = None

    @property
    def num_calls_in_sync(self) -> int:
        """How many calls make one update together."""
        return self.settings.num_workers if self.settings.is_synchronous else 1

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that was given."""
        return self._resolver

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Returns a dataset of this process, for evaluation.

        A trainer that gets it calls `dataset_fn` again on each worker, with the
        worker's own `InputContext`.
        """
        dataset = super().distribute_datasets_from_function(dataset_fn, options)
        dataset.dataset_fn = dataset_fn
        return dataset

    def _check_whole(self, function: str, leaf: Any) -> None:
        from armillary.parameter_server._closures import RemoteValue

        if isinstance(leaf, RemoteValue):
            raise ValueError(
                f"`{function}` was given the `RemoteValue` of a scheduled call, whose "
                "result is on a worker. Fetch it first, and compute with what comes: "
                "`coordinator.fetch(values)`."
            )
        super()._check_whole(function, leaf)

    def fit_scope(
        self, model: Any, arguments: dict[str, Any]
    ) -> AbstractContextManager[None]:
        """Lets workers take all steps of an epoch at once.

        Raises:
            ValueError: If workers wait for each other, or it is not known how many
                steps an epoch has.
        """
        from armillary.parameter_server._scheduled_fit import epochs_as_one

        if self.settings.is_synchronous:
            raise ValueError(
                "`fit` of a Keras model was called under "
                "`ParameterServerStrategy(max_staleness=0)`, whose workers make one "
                "update together, but Keras computes the loss of each as if it were "
                "alone. Use an `armillary.keras.KerasTrainer` under a `Controller`, or "
                "leave `max_staleness` out."
            )
        return epochs_as_one(model, arguments)

    def make_train_function(self, model: Any) -> Any:
        """Returns what schedules the training steps of a model."""
        from armillary.parameter_server._scheduled_fit import ScheduledSteps

        known = model.train_function
        if not isinstance(known, ScheduledSteps) or known.strategy is not self:
            known = ScheduledSteps(model, self)
        known.num_steps = model.steps_per_execution
        return known

    def __repr__(self) -> str:
        settings = self.settings
        return (
            f"ParameterServerStrategy({settings.num_workers} workers, "
            f"{settings.num_ps} parameter servers)"
        )


def _check_partitioner(partitioner: Callable[..., Sequence[int]]) -> None:
    """Raises if a partitioner cannot be called as one.

    Raises:
        TypeError: If it cannot.
    """
    check_callable("variable_partitioner", partitioner)
    try:
        inspect.signature(partitioner).bind((1,), np.dtype("float32"), axis=0)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`variable_partitioner` is {partitioner!r}, which cannot be called with "
            f"`(shape, dtype, axis=0)` ({error}). Use one of "
            "`armillary.distribute.partitioners`, or a function of these three."
        ) from error


def _count_tasks(
    resolver: ClusterResolver, num_workers: int | None, num_ps: int | None
) -> tuple[int, int]:
    """Returns the numbers of workers and of parameter servers of a cluster.

    Raises:
        ValueError: If a number was given as well.
        ClusterError: If this process is not the chief.
    """
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
