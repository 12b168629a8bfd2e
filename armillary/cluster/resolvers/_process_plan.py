"""What one process needs to join the others, whatever described the cluster."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from armillary.cluster.resolvers._spec import ClusterSpec, split_address
from armillary.cluster.resolvers._task import (
    TRAINING_TASK_TYPES,
    check_jobs,
    check_task,
)


@dataclass(frozen=True, kw_only=True)
class ProcessPlan:
    """Tells a process which one it is, of how many, and where they meet.

    Only the tasks of the jobs `chief` and `worker` train together: the chief, then the
    workers by index. The first of them is the chief even if no job is called so, and
    JAX's coordination service runs in it, at its address. An `evaluator` and a `ps` are
    programs of their own, each a single process to JAX.

    Args:
        task_type: The job of this process.
        task_id: Its index in the job.
        num_processes: How many processes train together, or None if JAX finds out.
        process_id: Which of them this one is, from 0, or None if JAX finds out.
        coordinator_address: Where process 0 is reached, or None if there is nobody to
            reach or JAX finds out.
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
        """Whether this process trains, rather than evaluates or holds parameters."""
        return self.task_type in TRAINING_TASK_TYPES

    @property
    def is_chief(self) -> bool | None:
        """Whether this is the training process that writes; None if JAX finds out."""
        if self.process_id is None:
            return None
        return self.is_training and self.process_id == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there are other processes to join, as far as is known."""
        return self.num_processes != 1

    def initialize_arguments(self) -> Mapping[str, Any]:
        """Returns the keyword arguments of `jax.distributed.initialize`.

        They are empty if JAX finds out by itself. Otherwise they switch its own
        detection off, which would limit each process of a Slurm job to one GPU, and
        keep the coordination service on the loopback interface if its address is there.
        By itself, JAX listens on all interfaces.
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
    """Returns the plan of one task of a cluster whose addresses are all known.

    Raises:
        ValueError: If the task is not one of the cluster's, or the cluster has two
            chiefs, two evaluators or a job without a meaning.
    """
    if not cluster_spec and task_type is None and task_id is None:
        return ProcessPlan()
    check_jobs(cluster_spec)
    check_task(cluster_spec, task_type, task_id)
    assert task_type is not None and task_id is not None
    alone = ProcessPlan(task_type=task_type, task_id=task_id)
    if not cluster_spec or not alone.is_training:
        return alone
    tasks = [
        (job, index)
        for job in TRAINING_TASK_TYPES
        if job in cluster_spec.jobs
        for index in cluster_spec.task_indices(job)
    ]
    return ProcessPlan(
        task_type=task_type,
        task_id=task_id,
        num_processes=len(tasks),
        process_id=tasks.index((task_type, task_id)),
        coordinator_address=cluster_spec.task_address(*tasks[0]),
    )


def is_loopback(address: str) -> bool:
    """Returns whether an address reaches this machine only."""
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # It is a name.
        return host == "localhost"
