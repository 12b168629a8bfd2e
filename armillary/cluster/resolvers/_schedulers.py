"""The variables that schedulers set for a process, and the choice of a resolver."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from armillary._checks import check_instance, check_one_of, check_positive_int
from armillary._logging import ensure_visible, logger
from armillary.cluster.resolvers._resolver import (
    ClusterResolver,
    Environ,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    find_environ,
    has_variables,
)
from armillary.cluster.resolvers._spec import (
    HIGHEST_PORT,
    TASK_TYPES,
    TRAINING_TASK_TYPES,
    ClusterSpec,
    ProcessPlan,
    check_address,
    check_single,
)
from armillary.errors import ClusterError

# These are above the ports that Linux assigns by itself (32768 to 60999).
_FIRST_SLURM_PORT = 61_440
_NUM_SLURM_PORTS = 4_096
_KUBERNETES_PORT = 2222
_TPU_PORT = 8482


class ScheduledResolver(SimpleClusterResolver):
    """Reads variables; holds the plan and the single address that they give."""

    _NEEDS: ClassVar[tuple[str, ...]]
    _FIX: ClassVar[str]  # The way to set the variables.
    _IS_OUTER = False  # True if another launcher may run inside this one.

    def __init__(self, environ: Environ | None) -> None:
        super().__init__({})
        self._environ = find_environ(environ)

    @classmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether this scheduler itself started the process."""
        # torchrun may run in a step of Slurm or in a pod. These do not count the
        # processes that torchrun starts.
        is_inner = cls._IS_OUTER and has_variables(environ, "TORCHELASTIC_RUN_ID")
        return has_variables(environ, *cls._NEEDS) and not is_inner

    def process_plan(self) -> ProcessPlan:
        """Returns the plan by which this process joins the others."""
        return self._plan

    def hold_alone(self) -> None:
        """Holds the plan of a single process, after JAX has found no other."""
        self._hold(ProcessPlan())

    def _hold(self, plan: ProcessPlan, chief_job: str = "worker") -> None:
        address = plan.coordinator_address
        self._cluster_spec = ClusterSpec({chief_job: [address]} if address else {})
        self._plan = plan
        if plan.process_id is not None:  # Or JAX finds out.
            self._task_type = plan.task_type
            self._task_id = plan.task_id

    def _hold_worker(
        self, index: int, count: int, address: str, gpus: tuple[int, ...] | None = None
    ) -> None:
        self._hold(
            ProcessPlan(
                task_id=index,
                num_processes=count,
                process_id=index,
                coordinator_address=address,
                local_device_ids=gpus,
            )
        )

    def _text(self, *names: str) -> str:
        """Returns the value of the first variable that is set; all mean the same."""
        for name in names:
            if has_variables(self._environ, name):
                return self._environ[name].strip()
        raise ClusterError(f"`{'` or `'.join(names)}` is not set. {self._FIX}")

    def _number(self, *names: str, below: float = math.inf) -> int:
        """Returns the value of the first variable that is set as an integer >= 0."""
        text = self._text(*names)
        if not text.isdecimal() or int(text) >= below:
            limit = "" if below == math.inf else f" and below {below}"
            raise ClusterError(
                f"`{'` or `'.join(names)}` is {text!r}, but it must be an integer of "
                f"at least 0{limit}. {self._FIX}"
            )
        return int(text)

    def _address(self, host: str, port: int) -> str:
        """Returns the address of process 0; an IPv6 address may lack its brackets."""
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        try:
            return check_address("coordinator_address", f"{host}:{port}")
        except ValueError as error:
            raise ClusterError(f"{error} {self._FIX}") from error


class SlurmClusterResolver(ScheduledResolver):
    """Reads the variables that Slurm sets for each task that `srun` starts.

    Task 0 runs on the first node of the list; the others need no address. Variables of
    the step have priority over variables of the job. JAX's own detection gives each
    task one GPU; here a task has all GPUs that Slurm lets it see.

    Args:
        jobs: How many tasks each job has, such as `{"worker": 4, "evaluator": 1}`.
            Slurm's tasks are the chief, then the workers, and then the others. By
            default all tasks are workers.
        port_base: The port of the coordination service, in task 0. By default it is
            computed from the numbers of the job and the step, so that two jobs on one
            node have different ports.
        gpus_per_task: The number of GPUs that each task of a node takes; the first task
            takes the first GPUs. By default a task uses all GPUs that it sees, which is
            right if Slurm binds them (`srun --gpus-per-task`) or a node runs one task.
        environ: The environment to read, by default `os.environ`.

    Raises:
        ClusterError: If a variable is missing or malformed, or `jobs` has another
            number of tasks.
        ValueError: If an argument is not a number of the kind it must be, or a job is
            not one of `tf.distribute`.
    """

    # A script in a batch job has some of the variables as well.
    _NEEDS = ("SLURM_STEP_NODELIST", "SLURM_PROCID")
    _FIX = "Start the program with `srun`, which sets it for each task."
    _IS_OUTER = True

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
            check_single(job, check_positive_int(f'jobs["{job}"]', count))
        if port_base is not None:
            check_positive_int("port_base", port_base, HIGHEST_PORT)
        if gpus_per_task is not None:
            check_positive_int("gpus_per_task", gpus_per_task)
        super().__init__(environ)

        num_tasks = self._number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        rank = self._number("SLURM_PROCID", below=num_tasks)
        jobs = jobs or {"worker": num_tasks}
        if sum(jobs.values()) != num_tasks:
            raise ClusterError(
                f"`jobs` is {dict(jobs)!r}, but Slurm started {num_tasks} tasks. "
                f"Change `jobs`, or use `srun --ntasks={sum(jobs.values())}`."
            )

        # The tasks of Slurm belong to the jobs in this order.
        tasks: list[tuple[str, int]] = []
        for job in TASK_TYPES:
            tasks += [(job, index) for index in range(jobs.get(job, 0))]
        task_type, task_id = tasks[rank]
        plan = ProcessPlan(task_type=task_type, task_id=task_id)
        if gpus_per_task is not None:
            first = self._number("SLURM_LOCALID") * gpus_per_task
            gpus = tuple(range(first, first + gpus_per_task))
            plan = dataclasses.replace(plan, local_device_ids=gpus)
        if plan.is_training:
            plan = dataclasses.replace(
                plan,
                num_processes=sum(job in TRAINING_TASK_TYPES for job, _ in tasks),
                process_id=rank,
                coordinator_address=self._find_first_node(port_base),
            )
        self._hold(plan, chief_job=tasks[0][0])

    def _find_first_node(self, port: int | None) -> str:
        if port is None:
            # Other jobs on the node choose another port.
            step_id = self._environ.get("SLURM_STEP_ID") or 0
            number = 31 * self._number("SLURM_JOB_ID") + int(step_id)
            port = _FIRST_SLURM_PORT + number % _NUM_SLURM_PORTS
        names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        # The first of `node[001-003,7],other` is node001.
        nodes = re.sub(r"\[([0-9]+)[0-9,-]*\]", r"\1", self._text(*names))
        return self._address(nodes.partition(",")[0], port)


class KubernetesClusterResolver(ScheduledResolver):
    """Reads the index of a pod and works out the name of the first one.

    Pod `i` of an indexed Job is called `JOB-i.SERVICE` if the pods' `subdomain` is the
    name of a headless Service that selects them. Kubernetes sets `JOB_COMPLETION_INDEX`
    and the pod's `HOSTNAME`; the pod template sets `ARMILLARY_NUM_PROCESSES` and
    `ARMILLARY_SERVICE_NAME`, and `ARMILLARY_PORT` if it is not to be 2222. All pods are
    workers, and must run at the same time. The Kubernetes API is not used, so no
    permission is needed.

    Args:
        environ: The environment to read, by default `os.environ`.

    Raises:
        ClusterError: If a variable is missing or malformed, or the index is not below
            the number of pods.
    """

    # The index alone says nothing: the pods may be independent runs.
    _NEEDS = ("JOB_COMPLETION_INDEX", "ARMILLARY_NUM_PROCESSES")
    _FIX = (
        "The pods of a Job with `completionMode: Indexed` have it, or their template "
        "sets it: see `KubernetesClusterResolver`."
    )
    _IS_OUTER = True

    def __init__(self, *, environ: Environ | None = None) -> None:
        super().__init__(environ)
        num_pods = self._number("ARMILLARY_NUM_PROCESSES")
        index = self._number("JOB_COMPLETION_INDEX", below=num_pods)
        is_set = has_variables(self._environ, "ARMILLARY_PORT")
        port = self._number("ARMILLARY_PORT") if is_set else _KUBERNETES_PORT
        hostname = self._text("HOSTNAME")
        # The name of a pod may include the domain.
        job, _, number = hostname.partition(".")[0].rpartition("-")
        if not job or number != str(index):
            raise ClusterError(
                f"`HOSTNAME` is {hostname!r}, but pod {index} of an indexed Job is "
                f"called by the Job's name and `-{index}`. Leave the pods' `hostname` "
                "to Kubernetes."
            )
        first = f"{job}-0.{self._text('ARMILLARY_SERVICE_NAME')}"
        self._hold_worker(index, num_pods, self._address(first, port))


class TorchrunClusterResolver(ScheduledResolver):
    """Reads the variables that torchrun and schedulers like it set.

    These are `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`. If several
    processes run on one machine, `LOCAL_RANK` and `LOCAL_WORLD_SIZE` are read too, and
    each process takes one GPU. All processes are workers.

    Where torchrun keeps `MASTER_PORT` for itself (`TORCHELASTIC_USE_AGENT_STORE` is
    `True`), JAX's coordination service takes the next port.

    Args:
        environ: The environment to read, by default `os.environ`.

    Raises:
        ClusterError: If a variable is missing or malformed, or a rank is not below its
            size.
    """

    _NEEDS = ("RANK", "WORLD_SIZE")
    _FIX = "Start the program with `torchrun`, which sets it for each process."

    def __init__(self, *, environ: Environ | None = None) -> None:
        super().__init__(environ)
        num_processes = self._number("WORLD_SIZE")
        rank = self._number("RANK", below=num_processes)
        port = self._number("MASTER_PORT")
        port += self._environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # A process that is alone on its machine uses all GPUs.
        is_alone = self._environ.get("LOCAL_WORLD_SIZE", "").strip() == "1"
        gpus = None
        if has_variables(self._environ, "LOCAL_RANK") and not is_alone:
            gpus = (self._number("LOCAL_RANK"),)
        address = self._address(self._text("MASTER_ADDR"), port)
        self._hold_worker(rank, num_processes, address, gpus)


class TPUClusterResolver(ScheduledResolver):
    """Reads the variables that describe the machines of a TPU slice.

    `TPU_WORKER_HOSTNAMES`, or `TPU_PROCESS_ADDRESSES` instead of it, lists the machines
    of the slice, and `TPU_WORKER_ID` says which of them this is. If a job has several
    slices, `MEGASCALE_NUM_SLICES`, `MEGASCALE_SLICE_ID` and
    `MEGASCALE_COORDINATOR_ADDRESS` join them: the workers of slice 0 come first.

    A machine that Google Compute Engine started has none of these variables. Then the
    plan leaves everything to JAX, which asks the metadata server.

    Args:
        tpu: May be `""` or `"local"`, as in TensorFlow's guides: the TPU that the
            program runs on, which is the only one it can use.
        environ: The environment to read, by default `os.environ`.

    Raises:
        ClusterError: If the machines are listed and another variable is missing or
            malformed.
        ValueError: If `tpu` names another TPU.
    """

    _NEEDS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
    _FIX = "The scheduler sets it on each machine."

    def __init__(
        self, tpu: str | None = None, *, environ: Environ | None = None
    ) -> None:
        if tpu is not None and str(tpu) not in ("", "local"):
            raise ValueError(
                f"`tpu` is {tpu!r}, but a program uses the TPU on whose machines it "
                "runs. Start it on every machine of that TPU, and leave `tpu` out."
            )
        super().__init__(environ)
        if not self.is_present(self._environ):
            self._hold(ProcessPlan(num_processes=None, process_id=None))
            return
        hosts = self._text(*self._NEEDS).split(",")
        worker = 0
        # A single machine may only know that it is alone.
        if len(hosts) > 1 or has_variables(self._environ, "TPU_WORKER_ID"):
            worker = self._number("TPU_WORKER_ID", below=len(hosts))
        num_slices = 1
        slice_id = 0
        if has_variables(self._environ, "MEGASCALE_NUM_SLICES"):
            num_slices = self._number("MEGASCALE_NUM_SLICES")
            slice_id = self._number("MEGASCALE_SLICE_ID", below=num_slices)
        first = hosts[0].strip()
        if num_slices > 1:
            first = self._text("MEGASCALE_COORDINATOR_ADDRESS")
        # The port is removed, because it belongs to the TPU runtime. An IPv6 address
        # without brackets has colons, but no port.
        head, _, port = first.rpartition(":")
        is_ipv6 = ":" in head and not head.startswith("[")
        if head and port.isdecimal() and not is_ipv6:
            first = head
        index = slice_id * len(hosts) + worker
        address = self._address(first, _TPU_PORT)
        self._hold_worker(index, num_slices * len(hosts), address)

    @classmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether the machines of a slice are listed."""
        return any(has_variables(environ, name) for name in cls._NEEDS)


# ORDER: variables that a person or a launcher wrote on purpose come before variables
# that a scheduler sets in every process. All processes of a job must choose the same.
RESOLVERS: dict[str, Any] = {
    "TF_CONFIG": TFConfigClusterResolver,
    "Slurm": SlurmClusterResolver,
    "Kubernetes": KubernetesClusterResolver,
    "torchrun": TorchrunClusterResolver,
    "a TPU slice": TPUClusterResolver,
}


def resolve_cluster(environ: Environ | None = None) -> ClusterResolver:
    """Returns the resolver that fits the environment, and logs the choice.

    The first of these that is present is taken: `TF_CONFIG`, Slurm, Kubernetes,
    torchrun, a TPU slice. Without any of them this is a single process.

    Args:
        environ: The environment to read, by default `os.environ`.

    Raises:
        ClusterError: If the chosen description is malformed. The next resolver is not
            tried, because this process would train alone while the others wait for it.
    """
    ensure_visible()
    environ = find_environ(environ)
    present = [name for name, kind in RESOLVERS.items() if kind.is_present(environ)]
    if not present:
        known = ", ".join(RESOLVERS)
        logger.info(
            "cluster | a single process: the environment has no variables of %s", known
        )
        return SimpleClusterResolver({})
    chosen, *others = present
    resolver = RESOLVERS[chosen](environ=environ)
    plan = resolver.process_plan()
    place = "a single process"
    if plan.is_distributed:
        place = (
            f"process {plan.process_id} of {plan.num_processes}, "
            f"coordinator {plan.coordinator_address}"
        )
    task = f"{plan.task_type} {plan.task_id}"
    note = f" | comes before {', '.join(others)}" if others else ""
    logger.info("cluster | from %s: %s, %s%s", chosen, task, place, note)
    return resolver
