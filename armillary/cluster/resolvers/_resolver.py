"""The interface of every resolver, and the resolvers that get all addresses."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from armillary._checks import check_instance
from armillary.cluster.resolvers._spec import (
    ClusterSpec,
    ProcessPlan,
    check_task,
    plan_process,
)
from armillary.errors import ClusterError

Environ = Mapping[str, str]
_EXAMPLE = (
    "A correct value is, for example:\n"
    'TF_CONFIG=\'{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}\''
)


def find_environ(environ: Environ | None) -> Environ:
    """Returns `environ`, or the environment of this process."""
    fix = "Use a dictionary of strings, or leave it out."
    check_instance("environ", environ, Mapping | None, fix)
    return os.environ if environ is None else environ


def has_variables(environ: Environ, *names: str) -> bool:
    """Returns whether all the variables are set and not empty."""
    return all(environ.get(name, "").strip() for name in names)


class ClusterResolver(ABC):
    """Describes the cluster of a process, as in `tf.distribute.cluster_resolver`.

    A resolver of your own returns the tasks of the cluster from `cluster_spec` and sets
    `task_type` and `task_id`. One that does not know all addresses overrides
    `process_plan` instead of relying on `cluster_spec`.
    """

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the cluster; none if this process is on its own."""

    @property
    def task_type(self) -> str | None:
        """The job of this process, such as `"worker"`, or None if it is not known."""
        return None

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, or None if it is not known."""
        return None

    def process_plan(self) -> ProcessPlan:
        """Returns the plan by which this process joins the others.

        Raises:
            ValueError: If this process is not a task of the cluster, or the cluster is
                not fit for training.
        """
        return plan_process(self.cluster_spec(), self.task_type, self.task_id)


class SimpleClusterResolver(ClusterResolver):
    """Returns the cluster and the task that it was given.

    Args:
        cluster_spec: The tasks of the cluster. A mapping is made into a `ClusterSpec`.
        task_type: The job of this process: `"chief"`, `"worker"`, `"ps"` or
            `"evaluator"`.
        task_id: The index of this process in its job.

    Raises:
        TypeError: If `cluster_spec` cannot be made into a `ClusterSpec`.
        ValueError: If `task_type` and `task_id` do not name a task of the cluster.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, Sequence[str]],
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        self._cluster_spec = ClusterSpec(cluster_spec)
        if task_type is not None or task_id is not None:
            check_task(self._cluster_spec, task_type, task_id)
        self._task_type = task_type
        self._task_id = task_id

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the cluster."""
        return self._cluster_spec

    @property
    def task_type(self) -> str | None:
        """The job of this process."""
        return self._task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job."""
        return self._task_id


class TFConfigClusterResolver(SimpleClusterResolver):
    """Reads the JSON of `TF_CONFIG`, as `tf.distribute` does.

    `cluster` maps each job to the addresses of its tasks, and `task` says which of them
    this process is. The jobs with a meaning are `chief`, `worker`, `ps` and
    `evaluator`; an evaluator need not be listed in the cluster. Without `cluster`, the
    process is on its own. Other keys are left alone.

    Args:
        task_type: The job of this process, instead of the one in `TF_CONFIG`.
        task_id: The index of this process in its job, instead of the one in
            `TF_CONFIG`.
        environ: The environment to read, by default `os.environ`.

    Raises:
        ClusterError: If `TF_CONFIG` is not set, is malformed, or describes a cluster
            that cannot train. The message shows a correct example.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        *,
        environ: Environ | None = None,
    ) -> None:
        text = find_environ(environ).get("TF_CONFIG", "")
        try:
            config = json.loads(text)
            check_instance("TF_CONFIG", config, dict, "Use a JSON object, in braces.")
            cluster = config.get("cluster", {})
            task = config.get("task")
            if cluster or task is not None:
                name = 'TF_CONFIG["task"]'
                check_instance(name, task, dict, "It says which task this process is.")
                task_type = task.get("type") if task_type is None else task_type
                if task_id is None:
                    index = task.get("index")
                    # Shell scripts often quote the number.
                    task_id = int(index) if str(index).isdecimal() else index
            super().__init__(cluster, task_type, task_id)
            super().process_plan()
        except (TypeError, ValueError) as error:
            raise ClusterError(
                f"`TF_CONFIG` is {text!r}, and describes no task of a cluster that can "
                f"train: {error} {_EXAMPLE}"
            ) from error

    @classmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether `TF_CONFIG` is set."""
        return has_variables(environ, "TF_CONFIG")


def check_is_no_server(resolver: ClusterResolver | None) -> None:
    """Raises if this process is a `ps`, which would train alone.

    Args:
        resolver: The source of this process's task; by default `TF_CONFIG`, if it is
            set.
    """
    source = "The cluster resolver"
    if resolver is None:
        if not TFConfigClusterResolver.is_present(os.environ):
            return
        try:
            resolver = TFConfigClusterResolver()
        except ClusterError:  # Only strategies that join a cluster report it.
            return
        source = "`TF_CONFIG`"

    if resolver.task_type == "ps":
        raise ClusterError(
            f"{source} says that this process is ps {resolver.task_id}, a parameter "
            "server, but no strategy except `ParameterServerStrategy` has parameter "
            "servers: this process would train alone. In a ps, run "
            "`armillary.distribute.coordinator.Server(resolver).join()`; without "
            "parameter servers, take the job 'ps' out of the cluster."
        )
