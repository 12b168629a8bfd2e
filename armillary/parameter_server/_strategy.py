"""The strategy of asynchronous training, in the process that schedules."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from armillary._checks import (
    check_callable,
    check_instance,
    check_positive_int,
    check_seconds,
)
from armillary._logging import ensure_visible, logger
from armillary.cluster.resolvers._resolver import (
    ClusterResolver,
    TFConfigClusterResolver,
)
from armillary.distribute.replica._axis import DEFAULT_AXIS_NAME, check_axis_name
from armillary.distribute.strategies._placements import DevicePlacement
from armillary.distribute.strategies._single import SingleStrategy
from armillary.errors import ClusterError, StateStructureError
from armillary.parameter_server._loop import AsynchronousLoop
from armillary.parameter_server._node import check_cluster, has_joined, name_resource
from armillary.state._holders import is_claimed
from armillary.state._lift import State
from armillary.typing import PyTree


class ServerPlacement(DevicePlacement):
    """State in this process, except while workers train."""

    @property
    def reason(self) -> str:
        return "on parameter servers while workers train"


class ParameterServerStrategy(SingleStrategy):
    """Variables on parameter servers, steps on workers that do not wait for each other.

    It works like `tf.distribute.ParameterServerStrategy`, over Ray (extra `ray`). A
    `ClusterCoordinator` schedules functions. A `StandardTrainer` under this strategy,
    and `fit` of a Keras model that was made in the scope, schedule their steps
    themselves. In this process, the coordinator, it is a strategy of one device: models
    are made, evaluated and saved here, and `run` runs here.

    Args:
        cluster_resolver: The addresses of the chief, the workers and the parameter
            servers of a cluster, such as `armillary.cluster.TFConfigClusterResolver()`.
            All of them run the same program
            (`armillary.distribute.coordinator.Server`). By default they come from
            `TF_CONFIG`, if it is set. Without it, workers and servers are processes of
            this machine, or of the Ray cluster at `RAY_ADDRESS`.
        variable_partitioner: A function that returns the number of parts into which a
            variable is cut along its first axis, such as
            `armillary.distribute.partitioners.MinSizePartitioner`. By default each
            variable is whole on one server.
        num_workers: Number of workers, if no cluster is described. By default 2.
        num_ps: Number of parameter servers, if no cluster is described. By default 1.
        report_seconds: The time in seconds after which a call that has not ended is
            reported.
        worker_options: Options of Ray for the actors of workers, such as
            `{"num_gpus": 1}`.
        ps_options: Options of Ray for the actors of parameter servers.
        axis_name: As for `MirroredStrategy`. The axis has length 1 on each worker.

    Attributes:
        num_workers: Number of workers.
        num_ps: Number of parameter servers.

    Raises:
        TypeError: If the resolver or the partitioner has another type, or `axis_name`
            is not a string.
        ValueError: If a number is out of range, or given for a cluster that a resolver
            or `TF_CONFIG` describes, or `axis_name` is empty.
        ClusterError: If the cluster lacks a job, or this process is not the chief.
    """

    loop_class = AsynchronousLoop

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
        axis_name: str = DEFAULT_AXIS_NAME,
    ) -> None:
        super().__init__(axis_name=check_axis_name(axis_name))
        self.placement = ServerPlacement.on(None)
        fix = 'Use a dictionary of options of Ray, such as `{"num_cpus": 1}`.'
        check_instance("worker_options", worker_options, dict | None, fix)
        check_instance("ps_options", ps_options, dict | None, fix)
        check_seconds("report_seconds", report_seconds, "Use a positive number.")
        if variable_partitioner is not None:
            check_callable("variable_partitioner", variable_partitioner)
        fix = "Pass an `armillary.cluster.TFConfigClusterResolver()`."
        kind = ClusterResolver | None
        check_instance("cluster_resolver", cluster_resolver, kind, fix)

        source = "cluster_resolver"
        if cluster_resolver is None:
            source = "TF_CONFIG"
            cluster_resolver = _read_tf_config()
        self._resolver = cluster_resolver
        if cluster_resolver is not None:
            _check_left_to(source, num_workers, num_ps)
            num_workers, num_ps = _count_tasks(source, cluster_resolver)
        if cluster_resolver is not None and source == "TF_CONFIG":
            ensure_visible()
            logger.info(
                "cluster | from TF_CONFIG: the chief of %d workers and %d parameter "
                "servers",
                num_workers,
                num_ps,
            )

        self.num_workers = check_positive_int(
            "num_workers", 2 if num_workers is None else num_workers
        )
        self.num_ps = check_positive_int("num_ps", 1 if num_ps is None else num_ps)
        self.variable_partitioner = variable_partitioner
        self.report_seconds = report_seconds
        self._options = {"worker": worker_options or {}, "ps": ps_options or {}}
        # The type is `Any`, because the module of the class imports this one.
        self.coordinator: Any = None
        self._has_warned_of_run = False

    def actor_options(self, job: str, index: int) -> dict[str, Any]:
        """Returns Ray's options of the actor of a task."""
        # Ray restarts a lost worker on any node with room. A lost server is not
        # restarted, because its values are lost too.
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_restarts": -1 if job == "worker" else 0,
        }
        options |= self._options[job]
        if self._resolver is not None:
            # As in `Server`: each task has a node of its own.
            resources = dict(options.get("resources", {}))
            resources[name_resource(job, index)] = 1.0
            options["resources"] = resources
        return options

    def name_task(self, job: str, index: int) -> str:
        """Returns the name of a task for messages, with its address if it has one."""
        if self._resolver is None:
            return f"{job} {index}"
        address = self._resolver.cluster_spec().task_address(job, index)
        return f"{job} {index} at {address}"

    def describe_absent(self, job: str, index: int) -> str:
        """Returns a possible reason for which a task does not answer."""
        if self._resolver is None:
            return "Ray has not started its process yet, or has no room for it"
        if has_joined(job, index):
            return "its node has joined the cluster, and its process starts"
        return (
            "its node is not in the cluster. Start the program there, and look at what "
            "it prints"
        )

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that was given, or read from `TF_CONFIG`."""
        return self._resolver

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        """Runs a function here, and warns once if it trains while workers are idle."""
        if self._has_warned_of_run:
            return super()._run(state, fn, *args, **kwargs)

        reached = _find_state(fn, args, kwargs) if state is None else state
        before = _read_parameters(reached)
        result = super()._run(state, fn, *args, **kwargs)
        after = _read_parameters(reached)
        has_trained = any(after.get(key, old) is not old for key, old in before.items())
        if has_trained:
            self._has_warned_of_run = True
            logger.warning(
                "`strategy.run` of %r changes parameters only in this process, and "
                "the %d workers stay idle. To train on workers, schedule the step: "
                "`armillary.distribute.coordinator.ClusterCoordinator(strategy)"
                ".schedule(step_fn, args=(per_worker_iterator,))`.",
                self,
                self.num_workers,
            )
        return result

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


def _read_tf_config() -> ClusterResolver | None:
    """Returns the resolver of `TF_CONFIG`, if that describes more than one process."""
    if not TFConfigClusterResolver.is_present(os.environ):
        return None
    resolver = TFConfigClusterResolver()
    is_alone = not resolver.cluster_spec() and resolver.task_type != "evaluator"
    return None if is_alone else resolver


def _check_left_to(source: str, num_workers: int | None, num_ps: int | None) -> None:
    """Raises if numbers of tasks are given although `source` defines them."""
    if num_workers is not None or num_ps is not None:
        raise ValueError(
            f"`num_workers` is {num_workers!r} and `num_ps` is {num_ps!r}, but "
            f"`{source}` counts both. Leave them out."
        )


def _count_tasks(source: str, resolver: ClusterResolver) -> tuple[int, int]:
    is_evaluator = resolver.task_type == "evaluator"
    spec = {} if is_evaluator else check_cluster(resolver, source)
    if resolver.task_type != "chief":
        task = "an evaluator" if is_evaluator else f"a {resolver.task_type}"
        raise ClusterError(
            f"`{source}` says that this process is {task}, but the "
            "chief makes a `ParameterServerStrategy`. Workers and ps run "
            "`armillary.distribute.coordinator.Server(resolver).join()`, with "
            "`resolver = armillary.cluster.TFConfigClusterResolver()`, before any "
            "strategy is made. An evaluator makes a strategy of its own devices, and "
            "reads checkpoints."
        )
    return len(spec["worker"]), len(spec["ps"])


def _find_state(fn: Callable[..., Any], args: Any, kwargs: Any) -> State:
    """Returns the state that a function and its arguments reach."""
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_claimed)
    return State([(fn, ""), *((leaf, "") for leaf in leaves if is_claimed(leaf))])


def _read_parameters(state: State) -> dict[Any, Any]:
    """Returns the arrays of parameters, by slot and by place in it."""
    found: dict[Any, Any] = {}
    for slot in state.slots:
        if not slot.is_parameter():
            continue
        try:
            leaves = slot.read()
        except StateStructureError:  # The slot has a different structure by now.
            continue
        found |= {(id(slot), place): leaf for place, leaf in enumerate(leaves)}
    return found
