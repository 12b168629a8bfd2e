"""The interface of every resolver, and those that are told all addresses."""

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from armillary._checks import check_instance
from armillary.cluster.resolvers._spec import (
    ClusterSpec,
    ProcessPlan,
    check_task,
    plan_process,
    read_tasks,
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
    """Tells a process about its cluster, as in `tf.distribute.cluster_resolver`.

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
        """Returns what this process needs to join the others.

        Raises:
            ValueError: If this process is not a task of the cluster, or the cluster is
                not fit for training.
        """
        return plan_process(self.cluster_spec(), self.task_type, self.task_id)


class SimpleClusterResolver(ClusterResolver):
    """Returns what it was given.

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
        self._task_type, self._task_id = task_type, task_id

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
    process is on its own. Keys that other programs put there are left alone.

    Args:
        task_type: The job of this process, instead of what `TF_CONFIG` says.
        task_id: The index of this process in its job, likewise.
        environ: The environment to read, by default that of this process.

    Raises:
        ClusterError: If `TF_CONFIG` is not set, or is malformed. The message names the
            key and shows a correct example.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        *,
        environ: Environ | None = None,
    ) -> None:
        environ = find_environ(environ)
        try:
            tasks, task_type, task_id = _read_config(environ, task_type, task_id)
        except (TypeError, ValueError) as error:
            raise ClusterError(f"{error} {_EXAMPLE}") from error
        super().__init__(tasks, task_type, task_id)

    @classmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether `TF_CONFIG` is set."""
        return has_variables(environ, "TF_CONFIG")

    def process_plan(self) -> ProcessPlan:
        """Returns what this process needs to join the others.

        Raises:
            ClusterError: If the cluster is not fit for training.
        """
        try:
            return super().process_plan()
        except ValueError as error:
            raise ClusterError(
                f"`TF_CONFIG` describes a cluster that cannot train: {error} {_EXAMPLE}"
            ) from error


def _read_config(environ: Environ, task_type: Any, task_id: Any) -> tuple[Any, ...]:
    """Returns the tasks of the cluster, and which of them this process is."""
    if not has_variables(environ, "TF_CONFIG"):
        raise ValueError("`TF_CONFIG` is not set. It describes the cluster as JSON.")
    text, names = environ["TF_CONFIG"], {}
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        near = text[max(error.pos - 15, 0) : error.pos + 15]
        raise ValueError(
            f"`TF_CONFIG` is not valid JSON: {error}, near {near!r}."
        ) from (error)
    check_instance("TF_CONFIG", config, dict, "Use a JSON object, in braces.")
    if (layer := config.get("rpc_layer")) not in (None, "", "grpc"):
        raise ValueError(
            f'`TF_CONFIG["rpc_layer"]` is {layer!r}, but JAX speaks gRPC only. Leave '
            "the key out."
        )
    tasks = read_tasks('TF_CONFIG["cluster"]', config.get("cluster", {}))
    if tasks or "task" in config:
        name, task = 'TF_CONFIG["task"]', config.get("task")
        fix = "It says which task of the cluster this process is."
        check_instance(name, task, dict, fix)
        for key in {"type", "index"} - task.keys():
            raise ValueError(f"`{name}` is {task!r}, but it must have `{key}`. {fix}")
        if task_type is None:
            task_type, names["type_name"] = task["type"], f'{name}["type"]'
        if task_id is None:
            # Shell scripts often quote the number.
            index, names["id_name"] = task["index"], f'{name}["index"]'
            is_quoted = isinstance(index, str) and re.fullmatch(r"[0-9]{1,18}", index)
            task_id = int(index) if is_quoted else index
    if task_type is not None or task_id is not None:
        check_task(ClusterSpec(tasks), task_type, task_id, **names)
        alone = (("worker", 0), ("evaluator", 0))
        if not tasks and (task_type, task_id) not in alone:
            raise ValueError(
                f"`TF_CONFIG` says that this process is {task_type} {task_id}, but not "
                "where the others are: it has no `cluster`. Give the addresses of all "
                "tasks, or leave `task` out: a process alone is worker 0."
            )
    return tasks, task_type, task_id
