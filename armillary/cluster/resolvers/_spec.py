"""The tasks of a cluster with their addresses, and the plan by which one joins."""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from armillary._checks import (
    check_instance,
    check_not_negative_int,
    check_one_of,
)

TASK_TYPES = ("chief", "worker", "ps", "evaluator")
"""The jobs of `tf.distribute`; no other one has a meaning."""
TRAINING_TASK_TYPES = ("chief", "worker")
"""The jobs whose processes train together, in the order of their process ids."""
SINGLE_TASK_TYPES = ("chief", "evaluator")
"""The jobs of one task: two chiefs would both write, two evaluators as well."""
HIGHEST_PORT = 65_535

_ADDRESS = re.compile(
    r"(\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})"
)


class ClusterSpec:
    """Holds the addresses of a cluster's tasks, as `tf.train.ClusterSpec` does.

    A *job* is a named list of *tasks* that do the same, and each task is one process
    with an address. In `{"worker": ["10.0.0.2:2222", "10.0.0.3:2222"]}`,
    `task_address("worker", 1)` is `"10.0.0.3:2222"`.

    Args:
        cluster: Mapping from the name of each job to the addresses of its tasks. An
            address is a host, or an IPv6 address in brackets, a colon and a port. A job
            without tasks is left out. Another `ClusterSpec` is copied.

    Raises:
        TypeError: If `cluster` is not a mapping, or a job is not a list of strings.
        ValueError: If a job has no name, or an address is malformed or given twice.
    """

    def __init__(self, cluster: "Mapping[str, Sequence[str]] | ClusterSpec") -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        fix = 'Use, for example, `{"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}`.'
        check_instance("cluster", cluster, Mapping, fix)
        self._tasks: dict[str, list[str]] = {}
        places: dict[str, str] = {}
        for job, addresses in cluster.items():
            name = f'cluster["{job}"]'
            if not isinstance(job, str) or not job:
                raise ValueError(
                    f"`cluster` has the job {job!r}, which is not a name. {fix}"
                )
            check_instance(name, addresses, list | tuple, fix)
            for index, address in enumerate(addresses):
                place = f"{name}[{index}]"
                check_address(place, address)
                if places.setdefault(address, place) != place:
                    raise ValueError(
                        f"`{place}` is {address!r}, as is `{places[address]}`, but "
                        "each task has an address of its own. Use another port."
                    )
            if addresses:
                self._tasks[job] = list(addresses)

    def as_dict(self) -> dict[str, list[str]]:
        """Returns the addresses of the tasks of each job."""
        return {job: list(tasks) for job, tasks in self._tasks.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order in which they were given."""
        return list(self._tasks)

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of the tasks of a job, from 0.

        Raises:
            ValueError: If the cluster has no job of that name.
        """
        check_one_of("job_name", job_name, self.jobs)
        return list(range(len(self._tasks[job_name])))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of one task.

        Raises:
            ValueError: If the cluster has no such job, or the job no such task.
        """
        check_one_of("task_index", task_index, self.task_indices(job_name))
        return self._tasks[job_name][task_index]

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClusterSpec):
            return NotImplemented
        return self._tasks == other._tasks

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


@dataclass(frozen=True, kw_only=True)
class ProcessPlan:
    """Gives a process its number, the count of processes, and their meeting point.

    Only the tasks of the jobs `chief` and `worker` train together: the chief, then the
    workers by index. The first of these tasks is the chief even if no job has this
    name. JAX's coordination service runs in it, at its address. An `evaluator` and a
    `ps` are programs of their own, each a single process to JAX.

    Args:
        task_type: The job of this process.
        task_id: The index of this process in the job.
        num_processes: The number of processes that train together, or None if JAX finds
            it out.
        process_id: The number of this process among them, from 0, or None if JAX finds
            it out.
        coordinator_address: The address of process 0, or None if there is no other
            process or JAX finds it out.
        local_device_ids: The GPUs of the machine that this process may use, or None for
            all that it sees.
    """

    task_type: str = "worker"
    task_id: int = 0
    num_processes: int | None = 1
    process_id: int | None = 0
    coordinator_address: str | None = None
    local_device_ids: tuple[int, ...] | None = None

    @property
    def is_training(self) -> bool:
        """True if this process trains, and does not evaluate or hold parameters."""
        return self.task_type in TRAINING_TASK_TYPES

    @property
    def is_chief(self) -> bool | None:
        """True in the training process that writes files; None if JAX finds it out."""
        if self.process_id is None:
            return None
        return self.is_training and self.process_id == 0

    @property
    def is_distributed(self) -> bool:
        """True if there are other processes to join, or JAX finds it out."""
        return self.num_processes != 1

    def initialize_arguments(self) -> Mapping[str, Any]:
        """Returns the keyword arguments of `jax.distributed.initialize`.

        They are empty if JAX finds its job by itself. Otherwise they switch JAX's own
        detection off, because it limits each process of a Slurm job to one GPU. If the
        address of the coordination service is on the loopback interface, they keep the
        service there. By itself, JAX listens on all interfaces.
        """
        if self.num_processes is None:
            return {}
        arguments: dict[str, Any] = {
            "coordinator_address": self.coordinator_address,
            "num_processes": self.num_processes,
            "process_id": self.process_id,
            "local_device_ids": self.local_device_ids,
            "cluster_detection_method": "deactivate",
        }
        if self.coordinator_address and is_loopback(self.coordinator_address):
            arguments["coordinator_bind_address"] = self.coordinator_address
        return arguments


def plan_process(
    cluster_spec: ClusterSpec, task_type: str | None, task_id: int | None
) -> ProcessPlan:
    """Returns the plan of one task of a cluster whose addresses are all known."""
    has_task = task_type is not None or task_id is not None
    if not cluster_spec and not has_task:
        return ProcessPlan()
    for job, addresses in cluster_spec.as_dict().items():
        check_one_of("cluster_spec", job, TASK_TYPES)
        check_single(job, len(addresses))
    check_task(cluster_spec, task_type, task_id)
    assert task_type is not None and task_id is not None
    alone = ProcessPlan(task_type=task_type, task_id=task_id)
    if not cluster_spec or not alone.is_training:
        return alone

    tasks: list[tuple[str, int]] = []
    for job in TRAINING_TASK_TYPES:
        if job in cluster_spec.jobs:
            tasks += [(job, index) for index in cluster_spec.task_indices(job)]
    return replace(
        alone,
        num_processes=len(tasks),
        process_id=tasks.index((task_type, task_id)),
        coordinator_address=cluster_spec.task_address(*tasks[0]),
    )


def check_single(job: str, count: int) -> None:
    """Raises if a job that may have one task has more."""
    if job in SINGLE_TASK_TYPES and count > 1:
        raise ValueError(
            f"`{job}` has {count} tasks, but only one process may write its files. "
            "Keep one, and call the others 'worker'."
        )


def check_task(cluster_spec: ClusterSpec, task_type: Any, task_id: Any) -> None:
    """Raises if no task of the cluster has this type and number."""
    check_one_of("task_type", task_type, TASK_TYPES)
    index = check_not_negative_int("task_id", task_id)
    # A process alone is worker 0, and an evaluator need not be listed.
    listed = {job: len(tasks) for job, tasks in cluster_spec.as_dict().items()}
    counts = {"evaluator": 1} | (listed or {"worker": 1})
    fix = "Use one of these, or add the address of the task to the cluster."
    check_one_of("task_type", task_type, list(counts), fix)
    check_one_of("task_id", index, range(counts[task_type]), fix)


def check_address(name: str, value: Any) -> str:
    """Returns `value`, or raises if it is not the address of a task."""
    check_instance(name, value, str, 'Use, for example, `"10.0.0.1:2222"`.')
    match = _ADDRESS.fullmatch(value)
    if match is None or not 1 <= int(match["port"]) <= HIGHEST_PORT:
        raise ValueError(
            f"`{name}` is {value!r}, but it must be a host, a colon and a port from 1 "
            f'to {HIGHEST_PORT}, such as `"10.0.0.1:2222"` or `"[::1]:2222"`.'
        )
    return value


def split_address(address: str) -> tuple[str, int]:
    """Returns the host, an IPv6 address without its brackets, and the port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Returns whether an address reaches this machine only."""
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # It is a name.
        return host == "localhost"
