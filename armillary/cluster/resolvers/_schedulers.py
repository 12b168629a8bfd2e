"""torchrun, and the schedulers that set the same variables.

Slurm: the variables that `srun` gives to each task of a step.

Kubernetes: an indexed Job whose pods find each other by name.
"""

import dataclasses
import re
from collections.abc import Mapping

from armillary._checks import check_instance, check_one_of, check_positive_int
from armillary.cluster.resolvers._resolver import (
    Environ,
    ScheduledResolver,
    check_below,
    find_environ,
    find_name,
    has_variables,
    make_address,
    read_int,
    read_text,
    take_share,
)
from armillary.cluster.resolvers._spec import (
    HIGHEST_PORT,
    SINGLE_TASK_TYPES,
    TASK_TYPES,
    TRAINING_TASK_TYPES,
    ProcessPlan,
    check_port,
)
from armillary.errors import ClusterError

SLURM_FIX = "Start the program with `srun`, which sets it for each task."
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
        num_name = find_name(environ, NUM_TASKS, SLURM_FIX)
        num_tasks = read_int(environ, num_name, SLURM_FIX, minimum=1)
        rank = read_int(environ, "SLURM_PROCID", SLURM_FIX)
        check_below("SLURM_PROCID", rank, num_tasks, f"the value of `{num_name}`")
        tasks = _list_tasks(jobs or {"worker": num_tasks}, num_tasks)
        task_type, task_id = tasks[rank]
        devices = None
        if gpus_per_task is not None:
            local_rank = read_int(environ, "SLURM_LOCALID", SLURM_FIX)
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
        job_id = read_int(environ, "SLURM_JOB_ID", SLURM_FIX)
        has_step = has_variables(environ, "SLURM_STEP_ID")
        step_id = read_int(environ, "SLURM_STEP_ID", SLURM_FIX) if has_step else 0
        port = FIRST_PORT + (31 * job_id + step_id) % NUM_PORTS
    name = find_name(environ, NODES, SLURM_FIX)
    # The first of `node[001-003,7],other` is node001.
    nodes = re.sub(r"\[([0-9]+)[0-9,-]*\]", r"\1", environ[name].strip())
    return make_address(nodes.partition(",")[0], port, f"`{name}`", SLURM_FIX)


DEFAULT_PORT = 2222
NUM_NAME = "ARMILLARY_NUM_PROCESSES"
INDEX_FIX = (
    "Kubernetes sets it in the pods of a Job with `completionMode: Indexed`. Use that "
    "mode."
)
NUM_FIX = (
    "It is the number of pods that train together. Set it in the pod template to the "
    "Job's `completions`."
)
SERVICE_FIX = (
    "It is the name of a headless Service, through which the pods find each other. Set "
    "it in the pod template to the pods' `subdomain`."
)


class KubernetesClusterResolver(ScheduledResolver):
    """Reads the index of a pod and works out the name of the first one.

    Pod `i` of an indexed Job is called `JOB-i.SERVICE` if the pods' `subdomain` is the
    name of a headless Service that selects them. Kubernetes sets `JOB_COMPLETION_INDEX`
    and the pod's `HOSTNAME`; the pod template sets `ARMILLARY_NUM_PROCESSES` and
    `ARMILLARY_SERVICE_NAME`, and `ARMILLARY_PORT` if it is not to be 2222. All pods are
    workers, and must run at once. The Kubernetes API is not asked, so no permission is
    needed.

    Args:
        environ: The environment to read, by default that of this process.

    Raises:
        ClusterError: If a variable is missing or malformed, or the index is not below
            the number of pods.
    """

    def __init__(self, *, environ: Environ | None = None) -> None:
        environ = find_environ(environ)
        num_processes = read_int(environ, NUM_NAME, NUM_FIX, minimum=1)
        index = read_int(environ, "JOB_COMPLETION_INDEX", INDEX_FIX)
        what = f"the value of `{NUM_NAME}`"
        check_below("JOB_COMPLETION_INDEX", index, num_processes, what)
        service = read_text(environ, "ARMILLARY_SERVICE_NAME", SERVICE_FIX)
        address = make_address(
            f"{_read_job_name(environ, index)}-0.{service}",
            _read_port(environ),
            "`HOSTNAME` and `ARMILLARY_SERVICE_NAME`",
            "Set the second to the name of the headless Service.",
        )
        super().__init__(
            ProcessPlan(
                task_id=index,
                num_processes=num_processes,
                process_id=index,
                coordinator_address=address,
            )
        )

    @classmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether this is a pod of an indexed Job that trains together.

        The index alone says nothing: the pods may be independent runs. And where
        torchrun started this process in a pod, its variables tell more.
        """
        return has_variables(
            environ, "JOB_COMPLETION_INDEX", NUM_NAME
        ) and not has_variables(environ, "TORCHELASTIC_RUN_ID")


def _read_port(environ: Environ) -> int:
    if not has_variables(environ, "ARMILLARY_PORT"):
        return DEFAULT_PORT
    fix = "Set it to a free port of the pods from 1 to 65535, such as 2222."
    port = read_int(environ, "ARMILLARY_PORT", fix, minimum=1)
    check_below("ARMILLARY_PORT", port, HIGHEST_PORT + 1, "the number of ports")
    return port


def _read_job_name(environ: Environ, index: int) -> str:
    fix = "It is the name of this pod, which Kubernetes sets."
    hostname = read_text(environ, "HOSTNAME", fix)
    # The name of a pod may include the domain.
    job, _, number = hostname.partition(".")[0].rpartition("-")
    if not job or number != str(index):
        raise ClusterError(
            f"`HOSTNAME` is {hostname!r}, but pod {index} of an indexed Job is called "
            f"by the Job's name and `-{index}`. Leave the pods' `hostname` to "
            "Kubernetes."
        )
    return job


TORCHRUN_FIX = "Start the program with `torchrun`, which sets it for each process."


class TorchrunClusterResolver(ScheduledResolver):
    """Reads the variables that torchrun and schedulers like it set.

    These are `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, and `LOCAL_RANK`
    and `LOCAL_WORLD_SIZE` where several processes run on one machine. All processes are
    workers.

    Where torchrun keeps `MASTER_PORT` for itself (`TORCHELASTIC_USE_AGENT_STORE` is
    `True`), JAX's coordination service takes the next port.

    Args:
        port: The port of the coordination service, which must be free where `RANK` is
            0. By default as above.
        gpus_per_task: How many GPUs of its machine each process takes, the process with
            `LOCAL_RANK` 0 the first ones. By default one, if there are several
            processes on the machine, and otherwise all that it sees.
        environ: The environment to read, by default that of this process.

    Raises:
        ClusterError: If a variable is missing or malformed, or a rank is not below its
            size.
        ValueError: If an argument is not a number of the kind it must be.
    """

    def __init__(
        self,
        port: int | None = None,
        *,
        gpus_per_task: int | None = None,
        environ: Environ | None = None,
    ) -> None:
        if port is not None:
            check_port("port", port)
        if gpus_per_task is not None:
            check_positive_int("gpus_per_task", gpus_per_task)
        environ = find_environ(environ)
        rank = read_int(environ, "RANK", TORCHRUN_FIX)
        num_processes = read_int(environ, "WORLD_SIZE", TORCHRUN_FIX, minimum=1)
        check_below("RANK", rank, num_processes, "the value of `WORLD_SIZE`")
        super().__init__(
            ProcessPlan(
                task_id=rank,
                num_processes=num_processes,
                process_id=rank,
                coordinator_address=_read_address(environ, port),
                local_device_ids=_read_devices(environ, gpus_per_task),
            )
        )

    @classmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether the rank and the number of processes are set."""
        return has_variables(environ, "RANK", "WORLD_SIZE")


def _read_address(environ: Environ, port: int | None) -> str:
    host = read_text(environ, "MASTER_ADDR", TORCHRUN_FIX)
    if port is None:
        port = read_int(environ, "MASTER_PORT", TORCHRUN_FIX, minimum=1)
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1
    return make_address(
        host,
        port,
        "`MASTER_ADDR` and `MASTER_PORT`",
        "Set them to a host and a free port of the process with `RANK` 0.",
    )


def _read_devices(
    environ: Environ, gpus_per_task: int | None
) -> tuple[int, ...] | None:
    if not has_variables(environ, "LOCAL_RANK"):
        if gpus_per_task is None:
            return None
        raise ClusterError(
            f"`gpus_per_task` is {gpus_per_task}, but `LOCAL_RANK` is not set, so the "
            "processes of a machine cannot share its GPUs out. Leave `gpus_per_task` "
            "out, or start the program with `torchrun`."
        )
    local_rank = read_int(environ, "LOCAL_RANK", TORCHRUN_FIX)
    if has_variables(environ, "LOCAL_WORLD_SIZE"):
        num_local = read_int(environ, "LOCAL_WORLD_SIZE", TORCHRUN_FIX, minimum=1)
        what = "the value of `LOCAL_WORLD_SIZE`"
        check_below("LOCAL_RANK", local_rank, num_local, what)
        if num_local == 1 and gpus_per_task is None:
            return None
    return take_share(local_rank, gpus_per_task or 1)
