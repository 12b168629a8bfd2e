"""What a process is in its cluster: the job it belongs to and its number there."""

from typing import Any

from armillary._checks import check_not_negative_int, check_one_of
from armillary.cluster.resolvers._spec import ClusterSpec

TASK_TYPES = ("chief", "worker", "ps", "evaluator")
"""The jobs of `tf.distribute`; no other one has a meaning."""

TRAINING_TASK_TYPES = ("chief", "worker")
"""The jobs whose processes train together, in the order of their process ids."""


SINGLE_TASK_TYPES = {
    "chief": (
        "only one process may write checkpoints and summaries. Keep one and call the "
        "others 'worker'."
    ),
    "evaluator": (
        "one process evaluates every checkpoint, and two would write the same "
        "summaries. Keep one."
    ),
}
"""The jobs of one task, and why."""


def check_jobs(cluster_spec: ClusterSpec) -> None:
    """Raises if a job of the cluster has no meaning, or more tasks than it may have."""
    for job, tasks in cluster_spec.as_dict().items():
        if job not in TASK_TYPES:
            raise ValueError(
                f"`cluster_spec` has the job {job!r}, but the jobs with a meaning are "
                f"{', '.join(map(repr, TASK_TYPES))}. Give its tasks one of these "
                "names, or leave it out."
            )
        why = SINGLE_TASK_TYPES.get(job)
        if why is not None and len(tasks) > 1:
            raise ValueError(
                f"`cluster_spec` has {len(tasks)} {job!r} tasks, but {why}"
            )


def check_task(
    cluster_spec: ClusterSpec,
    task_type: Any,
    task_id: Any,
    *,
    type_name: str = "task_type",
    id_name: str = "task_id",
) -> None:
    """Raises if no task of the cluster has this type and number.

    An evaluator need not be in the cluster: nobody connects to it. A cluster without
    any job is a single process, which may call itself anything else.

    Messages call the two `type_name` and `id_name`.
    """
    check_one_of(type_name, task_type, TASK_TYPES)
    check_not_negative_int(id_name, task_id)
    if task_type not in cluster_spec.jobs:
        if task_type == "evaluator" and task_id > 0:
            raise ValueError(
                f"`{id_name}` is {task_id}, but there is one evaluator, which is "
                f"number 0: {SINGLE_TASK_TYPES['evaluator']}"
            )
        if task_type == "evaluator" or not cluster_spec:
            return
        jobs = ", ".join(repr(job) for job in cluster_spec.jobs)
        raise ValueError(
            f"`{type_name}` is {task_type!r}, but the cluster has no such job: its "
            f"jobs are {jobs}. Use one of these, or add the addresses of the "
            f"{task_type!r} tasks to the cluster."
        )
    indices = cluster_spec.task_indices(task_type)
    if task_id not in indices:
        listed = ", ".join(str(index) for index in indices)
        raise ValueError(
            f"`{id_name}` is {task_id}, but the {task_type!r} tasks of the cluster are "
            f"{listed}. Use one of these, or add the address of {task_type} {task_id} "
            "to the cluster."
        )
