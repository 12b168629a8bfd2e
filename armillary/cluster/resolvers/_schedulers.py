"""What Slurm, Kubernetes and torchrun tell a process."""

import dataclasses
import re
from collections.abc import Mapping

from armillary._checks import (
    check_instance,
    check_one_of,
    check_positive_int,
)
from armillary.cluster.resolvers._resolver import (
    Environ,
    SimpleClusterResolver,
    find_environ,
    has_variables,
)
from armillary.cluster.resolvers._spec import (
    HIGHEST_PORT,
    TASK_TYPES,
    TRAINING_TASK_TYPES,
    ProcessPlan,
    check_address,
    check_port,
    check_single,
)
from armillary.errors import ClusterError

# Above the ports that Linux hands out by itself (32768 to 60999).
_FIRST_SLURM_PORT, _NUM_SLURM_PORTS = 61_440, 4_096
_KUBERNETES_PORT = 2222


class ScheduledResolver(SimpleClusterResolver):
    """Holds the plan that the variables gave, and the one address that they tell."""

    def __init__(self, plan: ProcessPlan, chief_job: str = "worker") -> None:
        address = plan.coordinator_address
        super().__init__({chief_job: [address]} if address else {})
        self._plan = plan
        if plan.process_id is not None:  # Or JAX finds out.
            self._task_type, self._task_id = plan.task_type, plan.task_id

    def process_plan(self) -> ProcessPlan:
        """Returns what this process needs to join the others."""
        return self._plan


def plan_worker(
    index: int, count: int, address: str, devices: tuple[int, ...] | None = None
) -> ProcessPlan:
    """Returns the plan of one of `count` workers."""
    return ProcessPlan(
        task_id=index,
        num_processes=count,
        process_id=index,
        coordinator_address=address,
        local_device_ids=devices,
    )


class Variables:
    """Reads the variables of a scheduler; `fix` says who sets them."""

    def __init__(self, environ: Environ, fix: str) -> None:
        self.environ, self._fix = environ, fix

    def find(self, *names: str) -> str:
        """Returns the first of some names that is set: they mean the same."""
        for name in names:
            if has_variables(self.environ, name):
                return name
        raise ClusterError(f"`{'` or `'.join(names)}` is not set. {self._fix}")

    def text(self, name: str) -> str:
        """Returns the value of a variable that must be set."""
        return self.environ[self.find(name)].strip()

    def number(self, name: str, *, least: int = 0, below: int | None = None) -> int:
        """Returns the value of a variable that must be an integer in a range."""
        text = self.text(name)
        is_number = re.fullmatch(r"[0-9]{1,18}", text) is not None
        if not is_number or int(text) < least or int(text) >= (below or int(text) + 1):
            limit = "" if below is None else f" and below {below}"
            raise ClusterError(
                f"`{name}` is {text!r}, but it must be an integer of at least "
                f"{least}{limit}. {self._fix}"
            )
        return int(text)

    def address(self, host: str, port: int, *names: str) -> str:
        """Returns the address of process 0; an IPv6 address may lack its brackets."""
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        try:
            return check_address("coordinator_address", f"{host}:{port}")
        except ValueError as error:
            raise ClusterError(
                f"`{'` and `'.join(names)}` cannot be used to reach process 0. {error} "
                f"{self._fix}"
            ) from error


def _take_share(index: int, size: int) -> tuple[int, ...]:
    """Returns the device ids of the process number `index` on its machine."""
    return tuple(range(index * size, (index + 1) * size))


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
        fix = "Start the program with `srun`, which sets it for each task."
        variables = Variables(find_environ(environ), fix)
        name = variables.find("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        num_tasks = variables.number(name, least=1)
        rank = variables.number("SLURM_PROCID", below=num_tasks)
        tasks = _list_tasks(jobs or {"worker": num_tasks}, num_tasks)
        task_type, task_id = tasks[rank]
        devices = None
        if gpus_per_task is not None:
            devices = _take_share(variables.number("SLURM_LOCALID"), gpus_per_task)
        plan = ProcessPlan(
            task_type=task_type, task_id=task_id, local_device_ids=devices
        )
        if plan.is_training:
            plan = dataclasses.replace(
                plan,
                num_processes=sum(job in TRAINING_TASK_TYPES for job, _ in tasks),
                process_id=rank,
                coordinator_address=_find_first_node(variables, port_base),
            )
        super().__init__(plan, chief_job=tasks[0][0])

    @classmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether `srun` started this process, and no other launcher since.

        A script in a batch job has some of the variables as well, without the other
        tasks; and those of `srun torchrun` are about torchrun's processes, not ours.
        """
        is_step = has_variables(environ, "SLURM_STEP_NODELIST", "SLURM_PROCID")
        return is_step and not has_variables(environ, "TORCHELASTIC_RUN_ID")


def _list_tasks(jobs: Mapping[str, int], num_tasks: int) -> list[tuple[str, int]]:
    """Returns the job and the index of each of Slurm's tasks."""
    if sum(jobs.values()) != num_tasks:
        raise ClusterError(
            f"`jobs` is {dict(jobs)!r}, which is {sum(jobs.values())} tasks, but Slurm "
            f"started {num_tasks}. Change `jobs`, or start the program with "
            f"`srun --ntasks={sum(jobs.values())}`."
        )
    for job, count in jobs.items():
        try:
            check_single(job, count)
        except ValueError as error:
            raise ClusterError(f"`jobs` is {dict(jobs)!r}, but {error}") from error
    return [(job, index) for job in TASK_TYPES for index in range(jobs.get(job, 0))]


def _find_first_node(variables: Variables, port: int | None) -> str:
    """Returns the address of task 0, at a port that other jobs there do not choose."""
    if port is None:
        job_id, step_id = variables.number("SLURM_JOB_ID"), 0
        if has_variables(variables.environ, "SLURM_STEP_ID"):
            step_id = variables.number("SLURM_STEP_ID")
        port = _FIRST_SLURM_PORT + (31 * job_id + step_id) % _NUM_SLURM_PORTS
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    name = variables.find(*names)
    # The first of `node[001-003,7],other` is node001.
    nodes = re.sub(r"\[([0-9]+)[0-9,-]*\]", r"\1", variables.text(name))
    return variables.address(nodes.partition(",")[0], port, name)


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
        fix = (
            "The pods of a Job with `completionMode: Indexed` have it, or their "
            "template sets it: see `KubernetesClusterResolver`."
        )
        variables = Variables(find_environ(environ), fix)
        num_pods = variables.number("ARMILLARY_NUM_PROCESSES", least=1)
        index = variables.number("JOB_COMPLETION_INDEX", below=num_pods)
        service, hostname = "ARMILLARY_SERVICE_NAME", variables.text("HOSTNAME")
        port = _KUBERNETES_PORT
        if has_variables(variables.environ, "ARMILLARY_PORT"):
            port = variables.number("ARMILLARY_PORT", least=1, below=HIGHEST_PORT + 1)
        # The name of a pod may include the domain.
        job, _, number = hostname.partition(".")[0].rpartition("-")
        if not job or number != str(index):
            raise ClusterError(
                f"`HOSTNAME` is {hostname!r}, but pod {index} of an indexed Job is "
                f"called by the Job's name and `-{index}`. Leave the pods' `hostname` "
                "to Kubernetes."
            )
        first = f"{job}-0.{variables.text(service)}"
        address = variables.address(first, port, service)
        super().__init__(plan_worker(index, num_pods, address))

    @classmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether this is a pod of an indexed Job that trains together.

        The index alone says nothing: the pods may be independent runs. And where
        torchrun started this process in a pod, its variables tell more.
        """
        names = ("JOB_COMPLETION_INDEX", "ARMILLARY_NUM_PROCESSES")
        is_torchrun = has_variables(environ, "TORCHELASTIC_RUN_ID")
        return has_variables(environ, *names) and not is_torchrun


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
        fix = "Start the program with `torchrun`, which sets it for each process."
        variables = Variables(environ, fix)
        num_processes = variables.number("WORLD_SIZE", least=1)
        rank = variables.number("RANK", below=num_processes)
        host = variables.text("MASTER_ADDR")
        if port is None:
            port = variables.number("MASTER_PORT", least=1)
            port += environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        devices, num_local = None, None
        if has_variables(environ, "LOCAL_WORLD_SIZE"):
            num_local = variables.number("LOCAL_WORLD_SIZE", least=1)
        is_one_of_several = has_variables(environ, "LOCAL_RANK") and num_local != 1
        if is_one_of_several or gpus_per_task is not None:
            local_rank = variables.number("LOCAL_RANK", below=num_local)
            devices = _take_share(local_rank, gpus_per_task or 1)
        address = variables.address(host, port, "MASTER_ADDR", "MASTER_PORT")
        super().__init__(plan_worker(rank, num_processes, address, devices))

    @classmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether the rank and the number of processes are set."""
        return has_variables(environ, "RANK", "WORLD_SIZE")
