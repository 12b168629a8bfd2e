"""Slurm: the variables that `srun` gives to each task of a step."""

import dataclasses
import re
from collections.abc import Mapping

from armillary._checks import check_instance, check_one_of, check_positive_int
from armillary.cluster.resolvers._process_plan import ProcessPlan
from armillary.cluster.resolvers._scheduler import (
    Environ,
    ScheduledResolver,
    check_below,
    find_environ,
    find_name,
    has_variables,
    make_address,
    read_int,
    take_share,
)
from armillary.cluster.resolvers._spec import check_port
from armillary.cluster.resolvers._task import (
    SINGLE_TASK_TYPES,
    TASK_TYPES,
    TRAINING_TASK_TYPES,
)
from armillary.errors import ClusterError

FIX = "Start the program with `srun`, which sets it for each task."
NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")

# Above the ports that Linux hands out by itself (32768 to 60999).
FIRST_PORT = 61_440
NUM_PORTS = 4_096


class SlurmClusterResolver(ScheduledResolver):
    """Reads what Slurm tells each task that `srun` starts.

    Task 0 runs on the first node of the list; the others need no address. Variables of
    the step come before those of the job: `SLURM_STEP_NODELIST` and
    `SLURM_STEP_NUM_TASKS`, then `SLURM_JOB_NODELIST`, `SLURM_NODELIST` and
    `SLURM_NTASKS`; and `SLURM_PROCID`, `SLURM_LOCALID`, `SLURM_JOB_ID`,
    `SLURM_STEP_ID`. JAX's own detection gives each task one GPU; here it has those that
    Slurm lets it see.

    Args:
        jobs: How many tasks each job has, such as `{"worker": 4, "evaluator": 1}`.
            Slurm's tasks are the chief, then the workers, and then the others. By
            default all tasks are workers.
        port_base: The port of the coordination service, in task 0. By default it is
            made from the number of the job and the step, so that two jobs on one node
            differ.
        gpus_per_task: How many GPUs of its node each task takes, the first task the
            first ones. By default a task uses all that it sees, which is right if
            Slurm binds them (`srun --gpus-per-task`) or a node runs one task.
        environ: The environment to read, by default that of this process.

    Raises:
        ClusterError: If a variable is missing or malformed, or `jobs` has another
            number of tasks.
        ValueError: If an argument is not a number of the kind it must be, or a job is
            not one of `tf.distribute`.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int | None = None,
        *,
        gpus_per_task: int | None = None,
        environ: Environ | None = None,
    ) -> None:
        fix = 'Use a dictionary, such as `{"worker": 4}`.'
        check_instance("jobs", jobs, Mapping | None, fix)
        for job, count in (jobs or {}).items():
            check_one_of("jobs", job, TASK_TYPES)
            check_positive_int(f'jobs["{job}"]', count)
        if port_base is not None:
            check_port("port_base", port_base)
        if gpus_per_task is not None:
            check_positive_int("gpus_per_task", gpus_per_task)
        environ = find_environ(environ)
        num_name = find_name(environ, NUM_TASKS, FIX)
        num_tasks = read_int(environ, num_name, FIX, minimum=1)
        rank = read_int(environ, "SLURM_PROCID", FIX)
        check_below("SLURM_PROCID", rank, num_tasks, f"the value of `{num_name}`")
        tasks = _list_tasks(jobs or {"worker": num_tasks}, num_tasks)
        task_type, task_id = tasks[rank]
        devices = None
        if gpus_per_task is not None:
            local_rank = read_int(environ, "SLURM_LOCALID", FIX)
            devices = take_share(local_rank, gpus_per_task)
        plan = ProcessPlan(
            task_type=task_type, task_id=task_id, local_device_ids=devices
        )
        if plan.is_training:
            plan = dataclasses.replace(
                plan,
                num_processes=sum(job in TRAINING_TASK_TYPES for job, _ in tasks),
                process_id=rank,
                coordinator_address=_find_coordinator(environ, port_base),
            )
        super().__init__(plan, chief_job=tasks[0][0])

    @classmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether `srun` started this process, and no other launcher since.

        A script in a batch job has some of the variables as well, without the other
        tasks; and those of `srun torchrun` are about torchrun's processes, not ours.
        """
        return has_variables(
            environ, "SLURM_STEP_NODELIST", "SLURM_PROCID"
        ) and not has_variables(environ, "TORCHELASTIC_RUN_ID")


def _list_tasks(jobs: Mapping[str, int], num_tasks: int) -> list[tuple[str, int]]:
    """Returns the job and the index of each of Slurm's tasks.

    Raises:
        ClusterError: If the jobs have another number of tasks, or there are two chiefs
            or two evaluators.
    """
    if sum(jobs.values()) != num_tasks:
        raise ClusterError(
            f"`jobs` is {dict(jobs)!r}, which is {sum(jobs.values())} tasks, but Slurm "
            f"started {num_tasks}. Change `jobs`, or start the program with "
            f"`srun --ntasks={sum(jobs.values())}`."
        )
    for job, why in SINGLE_TASK_TYPES.items():
        if jobs.get(job, 1) > 1:
            raise ClusterError(f"`jobs` has {jobs[job]} {job!r} tasks, but {why}")
    return [(job, index) for job in TASK_TYPES for index in range(jobs.get(job, 0))]


def _find_coordinator(environ: Environ, port: int | None) -> str:
    """Returns the address of task 0, at a port that other jobs there do not choose.

    Raises:
        ClusterError: If a variable is missing or malformed.
    """
    if port is None:
        job_id = read_int(environ, "SLURM_JOB_ID", FIX)
        has_step = has_variables(environ, "SLURM_STEP_ID")
        step_id = read_int(environ, "SLURM_STEP_ID", FIX) if has_step else 0
        port = FIRST_PORT + (31 * job_id + step_id) % NUM_PORTS
    name = find_name(environ, NODES, FIX)
    # The first of `node[001-003,7],other` is node001.
    nodes = re.sub(r"\[([0-9]+)[0-9,-]*\]", r"\1", environ[name].strip())
    return make_address(nodes.partition(",")[0], port, f"`{name}`", FIX)
