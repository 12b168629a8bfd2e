"""The strategy of asynchronous training."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from armillary._checks import (
    check_callable,
    check_instance,
    check_positive_int,
    check_seconds,
)
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.data._dataset import DistributedDataset
from armillary.data._layout import InputContext, InputOptions
from armillary.distribute.strategies._single import SingleStrategy
from armillary.errors import ClusterError
from armillary.parameter_server._node import check_cluster
from armillary.typing import PyTree


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
            writing. By default any number.
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
        max_staleness: int | None = None,
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
        if type(max_staleness) is int and max_staleness == 0:
            raise ValueError(
                f"`max_staleness` is {max_staleness!r}, but workers of parameter "
                "servers do not wait for each other. Use "
                "`armillary.MirroredStrategy()`, or over several processes "
                "`armillary.MultiWorkerMirroredStrategy()`."
            )
        if max_staleness is not None:
            check_positive_int("max_staleness", max_staleness)
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
        self.max_staleness, self.report_seconds = max_staleness, report_seconds
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

    def _collect(self, value: PyTree) -> PyTree:
        from armillary.parameter_server._closures import RemoteValue

        if any(isinstance(leaf, RemoteValue) for leaf in jax.tree.leaves(value)):
            raise ValueError(
                "A strategy was given the `RemoteValue` of a scheduled call, whose "
                "result is on a worker. Fetch it first: `coordinator.fetch(values)`."
            )
        return super()._collect(value)

    def fit_scope(
        self, model: Any, arguments: dict[str, Any]
    ) -> AbstractContextManager[None]:
        """Lets workers take all steps of an epoch at once.

        Raises:
            ValueError: If it is not known how many steps an epoch has.
        """
        from armillary.parameter_server._fit import epochs_as_one

        return epochs_as_one(model, arguments)

    def make_train_function(self, model: Any) -> Any:
        """Returns what schedules the training steps of a model."""
        from armillary.parameter_server._fit import ScheduledSteps

        known = model.train_function
        if not isinstance(known, ScheduledSteps) or known.strategy is not self:
            known = ScheduledSteps(model, self)
        known.num_steps = model.steps_per_execution
        return known

    def __repr__(self) -> str:
        return (
            f"ParameterServerStrategy({self.num_workers} workers, "
            f"{self.num_ps} parameter servers)"
        )


def _count_tasks(
    resolver: ClusterResolver, num_workers: int | None, num_ps: int | None
) -> tuple[int, int]:
    """Returns the numbers of workers and of parameter servers of a cluster."""
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
