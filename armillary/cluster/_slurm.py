"""Slurm: the variables that `srun` gives to each task of a step."""

from collections.abc import Mapping

from armillary._checks import check_one_of, check_positive_int
from armillary.cluster._environment import EnvironmentResolver, take_share
from armillary.cluster._node_list import expand_counts, expand_nodes
from armillary.cluster._spec import check_port
from armillary.cluster._task import TASK_TYPES
from armillary.cluster._variables import (
    Environ,
    check_below,
    find_environ,
    find_name,
    has_variables,
    make_cluster,
    number_ports,
    read_int,
    read_text,
)
from armillary.errors import ClusterError

FIX = "Start the program with `srun`, which sets it for each task."
NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")

# Above the ports that Linux hands out by itself, with 128 left for tasks on one node.
FIRST_PORT = 61_440
NUM_PORTS = 3_968


class SlurmClusterResolver(EnvironmentResolver):
    """Reads what Slurm tells each task that `srun` starts.

    Tasks are counted node by node, as Slurm's block distribution does. Variables of the
    step come before those of the job: `SLURM_STEP_NODELIST`, `SLURM_STEP_NUM_TASKS`,
    `SLURM_STEP_TASKS_PER_NODE`, then `SLURM_JOB_NODELIST`, `SLURM_NODELIST`,
    `SLURM_NTASKS` and `SLURM_TASKS_PER_NODE`; and `SLURM_PROCID`, `SLURM_LOCALID`,
    `SLURM_JOB_ID`, `SLURM_STEP_ID`.

    Args:
        jobs: How many tasks each job has, in the order in which Slurm's tasks are given
            to them, such as `{"worker": 4, "evaluator": 1}`. By default all tasks are
            workers.
        port_base: The port of the first task on each node; the next task has the next
            port. By default it is made from the number of the job and the step, so that
            two jobs on one node differ.
        gpus_per_task: How many GPUs of its node each task takes, the first task the
            first ones. By default a task uses all that it sees, which is right if
            Slurm binds them (`srun --gpus-per-task`) or a node runs one task.
        environ: The environment to read, by default that of this process.

    Raises:
        ClusterError: If a variable is missing or malformed, they contradict each other,
            or `jobs` has another number of tasks.
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
        for job, num_tasks in (jobs or {}).items():
            check_one_of("jobs", job, TASK_TYPES)
            check_positive_int(f'jobs["{job}"]', num_tasks)
        if port_base is not None:
            check_port("port_base", port_base)
        if gpus_per_task is not None:
            check_positive_int("gpus_per_task", gpus_per_task)
        environ = find_environ(environ)
        hosts = _read_hosts(environ)
        rank = read_int(environ, "SLURM_PROCID", FIX)
        check_below("SLURM_PROCID", rank, len(hosts), "the number of tasks")
        addresses = number_ports(hosts, port_base or _choose_port(environ))
        cluster, tasks = _share_out(addresses, jobs or {"worker": len(addresses)})
        devices = None
        if gpus_per_task is not None:
            local_rank = read_int(environ, "SLURM_LOCALID", FIX)
            devices = take_share(local_rank, gpus_per_task)
        cluster_spec = make_cluster(cluster, "Slurm's node names", FIX)
        super().__init__(cluster_spec, *tasks[rank], devices)

    @classmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether `srun` started this process, and no other launcher since.

        A script in a batch job has some of the variables as well, without the other
        tasks; and those of `srun torchrun` are about torchrun's processes, not ours.
        """
        return has_variables(
            environ, "SLURM_STEP_NODELIST", "SLURM_PROCID"
        ) and not has_variables(environ, "TORCHELASTIC_RUN_ID")


def _read_hosts(environ: Environ) -> list[str]:
    """Returns the node of each task.

    Raises:
        ClusterError: If a variable is missing or malformed, or they contradict each
            other.
    """
    nodes_name = find_name(environ, NODES, FIX)
    nodes = expand_nodes(nodes_name, read_text(environ, nodes_name, FIX))
    counts_name = find_name(environ, TASKS_PER_NODE, FIX)
    counts = expand_counts(counts_name, read_text(environ, counts_name, FIX))
    num_name = find_name(environ, NUM_TASKS, FIX)
    num_tasks = read_int(environ, num_name, FIX, minimum=1)
    if len(nodes) != len(counts) or sum(counts) != num_tasks:
        raise ClusterError(
            f"`{nodes_name}` is {environ[nodes_name]!r} ({len(nodes)} nodes), "
            f"`{counts_name}` is {environ[counts_name]!r} ({sum(counts)} tasks on "
            f"{len(counts)} nodes) and `{num_name}` is {num_tasks}, but they must "
            "agree. Start the program with `srun`, which sets all three for its step."
        )
    return [
        node for node, count in zip(nodes, counts, strict=True) for _ in range(count)
    ]


def _choose_port(environ: Environ) -> int:
    """Returns a port that other jobs and steps on the same node do not choose."""
    job_id = read_int(environ, "SLURM_JOB_ID", FIX)
    has_step = has_variables(environ, "SLURM_STEP_ID")
    step_id = read_int(environ, "SLURM_STEP_ID", FIX) if has_step else 0
    return FIRST_PORT + (31 * job_id + step_id) % NUM_PORTS


def _share_out(
    addresses: list[str], jobs: Mapping[str, int]
) -> tuple[dict[str, list[str]], list[tuple[str, int]]]:
    """Returns the addresses of each job, and the job and index of each rank.

    Raises:
        ClusterError: If the jobs have another number of tasks than Slurm started.
    """
    if sum(jobs.values()) != len(addresses):
        raise ClusterError(
            f"`jobs` is {dict(jobs)!r}, which is {sum(jobs.values())} tasks, but Slurm "
            f"started {len(addresses)}. Change `jobs`, or start the program with "
            f"`srun --ntasks={sum(jobs.values())}`."
        )
    cluster: dict[str, list[str]] = {}
    tasks: list[tuple[str, int]] = []
    for job, num_tasks in jobs.items():
        cluster[job] = addresses[len(tasks) : len(tasks) + num_tasks]
        tasks += [(job, index) for index in range(num_tasks)]
    return cluster, tasks
