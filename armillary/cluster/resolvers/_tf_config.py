"""The `TF_CONFIG` variable of `tf.distribute`, which many schedulers can set."""

import json
import re
from typing import Any

from armillary.cluster.resolvers._resolver import (
    Environ,
    SimpleClusterResolver,
    find_environ,
    has_variables,
    read_text,
)
from armillary.cluster.resolvers._spec import (
    ClusterSpec,
    ProcessPlan,
    check_task,
    read_tasks,
)
from armillary.errors import ClusterError

EXAMPLE = (
    'TF_CONFIG=\'{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}\''
)
FIX = f"A correct value is, for example:\n{EXAMPLE}"


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
        config = _read_config(find_environ(environ))
        cluster_spec = _read_cluster(config)
        task = _read_task(config, is_needed=bool(cluster_spec))
        names: dict[str, str] = {}
        if task_type is None and task:
            task_type, names["type_name"] = task["type"], 'TF_CONFIG["task"]["type"]'
        if task_id is None and task:
            task_id = _as_index(task["index"])
            names["id_name"] = 'TF_CONFIG["task"]["index"]'
        if task_type is not None or task_id is not None:
            try:
                check_task(cluster_spec, task_type, task_id, **names)
                if not cluster_spec:
                    _check_alone(task_type, task_id)
            except ValueError as error:
                raise ClusterError(f"{error} {FIX}") from error
        super().__init__(cluster_spec, task_type, task_id)

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
                f"`TF_CONFIG` describes a cluster that cannot train. {error} {FIX}"
            ) from error


def _read_config(environ: Environ) -> dict[str, Any]:
    text = read_text(environ, "TF_CONFIG", f"It describes the cluster as JSON. {FIX}")
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        near = text[max(error.pos - 15, 0) : error.pos + 15]
        raise ClusterError(
            f"`TF_CONFIG` is not valid JSON: {error.msg} at line {error.lineno}, "
            f"column {error.colno}, near {near!r}. {FIX}"
        ) from error
    _check_object("TF_CONFIG", config)
    rpc_layer = config.get("rpc_layer")
    if rpc_layer not in (None, "", "grpc"):
        raise ClusterError(
            f'`TF_CONFIG["rpc_layer"]` is {rpc_layer!r}, but JAX\'s coordination '
            f"service speaks gRPC only. Leave the key out, or use `grpc`. {FIX}"
        )
    return config


def _read_cluster(config: dict[str, Any]) -> ClusterSpec:
    try:
        tasks = read_tasks('TF_CONFIG["cluster"]', config.get("cluster", {}))
    except (TypeError, ValueError) as error:
        raise ClusterError(f"{error} {FIX}") from error
    return ClusterSpec(tasks)


def _read_task(config: dict[str, Any], *, is_needed: bool) -> dict[str, Any]:
    """Returns the task with both its keys, or an empty dict if there is none.

    Raises:
        ClusterError: If it is needed and missing, or malformed.
    """
    if "task" not in config and not is_needed:
        return {}
    if "task" not in config:
        raise ClusterError(
            "`TF_CONFIG` has no key `task`, which says which task of the cluster this "
            f"process is. {FIX}"
        )
    task = config["task"]
    _check_object('TF_CONFIG["task"]', task)
    for key in ("type", "index"):
        if key not in task:
            raise ClusterError(
                f'`TF_CONFIG["task"]` has no key `{key}`: it is {task!r}. {FIX}'
            )
    return task


def _check_alone(task_type: Any, task_id: Any) -> None:
    """Raises if a process without a cluster calls itself one of several."""
    if (task_type, task_id) not in (("worker", 0), ("evaluator", 0)):
        raise ValueError(
            f"`TF_CONFIG` says that this process is {task_type} {task_id}, but not "
            "where the others are: it has no `cluster`. Give the addresses of all "
            "tasks, or leave `task` out: a process alone is worker 0."
        )


def _check_object(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ClusterError(
            f"`{name}` is {value!r}, but it must be a JSON object, in braces. {FIX}"
        )


def _as_index(value: Any) -> Any:
    """Returns an index in a string as an integer, as shell scripts often quote it."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
        return int(value)
    return value
