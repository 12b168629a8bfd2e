"""TPU slices, and the choice of a resolver for a program that names none."""

from typing import Any

from armillary._logging import ensure_visible, logger
from armillary.cluster.resolvers._resolver import (
    ClusterResolver,
    Environ,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    find_environ,
    has_variables,
)
from armillary.cluster.resolvers._schedulers import (
    KubernetesClusterResolver,
    ScheduledResolver,
    SlurmClusterResolver,
    TorchrunClusterResolver,
    Variables,
    plan_worker,
)
from armillary.cluster.resolvers._spec import ClusterSpec, ProcessPlan, check_port

_PORT = 8482


class TPUClusterResolver(ScheduledResolver):
    """Reads the variables that describe the machines of a TPU slice.

    `TPU_WORKER_HOSTNAMES`, or `TPU_PROCESS_ADDRESSES` instead of it, lists the machines
    of the slice, and `TPU_WORKER_ID` says which of them this is. If a job has several
    slices, `MEGASCALE_NUM_SLICES`, `MEGASCALE_SLICE_ID` and
    `MEGASCALE_COORDINATOR_ADDRESS` join them: the workers of slice 0 come first.

    A machine that Google Compute Engine started has none of these variables. Then the
    plan leaves everything to JAX, which asks the metadata server.

    Args:
        port: The port of the coordination service on worker 0.
        tpu: May be `""` or `"local"`, as in TensorFlow's guides: the TPU that the
            program runs on, which is the only one it can use.
        environ: The environment to read, by default that of this process.

    Raises:
        ClusterError: If the machines are listed and another variable is missing or
            malformed.
        ValueError: If `port` is not the number of a port, or `tpu` names another TPU.
    """

    _HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")

    def __init__(
        self,
        port: int = _PORT,
        *,
        tpu: str | None = None,
        environ: Environ | None = None,
    ) -> None:
        check_port("port", port)
        if tpu is not None and str(tpu) not in ("", "local"):
            raise ValueError(
                f"`tpu` is {tpu!r}, but a program uses the TPU on whose machines it "
                "runs, and no other. Start it on every machine of that TPU, and leave "
                "`tpu` out."
            )
        environ = find_environ(environ)
        if not self.is_present(environ):
            super().__init__(ProcessPlan(num_processes=None, process_id=None))
            return
        variables = Variables(environ, "The scheduler sets it on each machine.")
        name = variables.find(*self._HOSTS)
        hosts = variables.text(name).split(",")
        # A single machine may only know that it is alone.
        is_told = len(hosts) > 1 or has_variables(environ, "TPU_WORKER_ID")
        worker = variables.number("TPU_WORKER_ID", below=len(hosts)) if is_told else 0
        num_slices, slice_id, first = 1, 0, hosts[0].strip()
        if has_variables(environ, "MEGASCALE_NUM_SLICES"):
            num_slices = variables.number("MEGASCALE_NUM_SLICES", least=1)
            slice_id = variables.number("MEGASCALE_SLICE_ID", below=num_slices)
        if num_slices > 1:
            name = "MEGASCALE_COORDINATOR_ADDRESS"
            first = variables.text(name)
        address = variables.address(_drop_port(first), port, name)
        index = slice_id * len(hosts) + worker
        super().__init__(plan_worker(index, num_slices * len(hosts), address))

    @classmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether the machines of a slice are listed."""
        return any(has_variables(environ, name) for name in cls._HOSTS)


def _drop_port(host: str) -> str:
    """Returns a host without the port, which is that of the TPU runtime."""
    head, _, port = host.rpartition(":")
    is_address = port.isdecimal() and (head.startswith("[") or ":" not in head)
    return head if head and is_address else host


# ORDER: what a person or a launcher wrote on purpose comes before what a scheduler sets
# in every process. All processes of a job must choose the same.
RESOLVERS: dict[str, Any] = {
    "TF_CONFIG": TFConfigClusterResolver,
    "Slurm": SlurmClusterResolver,
    "Kubernetes": KubernetesClusterResolver,
    "torchrun": TorchrunClusterResolver,
    "a TPU slice": TPUClusterResolver,
}


def resolve_cluster(environ: Environ | None = None) -> ClusterResolver:
    """Returns the resolver that fits the environment, and logs a line that says why.

    The first of these that is there is taken: `TF_CONFIG`, Slurm, Kubernetes, torchrun,
    a TPU slice. Without any of them this is a single process.

    Args:
        environ: The environment to read, by default that of this process.

    Raises:
        ClusterError: If what is taken is malformed. The next one is not tried: this
            process would train alone while the others wait for it.
    """
    ensure_visible()
    environ = find_environ(environ)
    present = [name for name, kind in RESOLVERS.items() if kind.is_present(environ)]
    if not present:
        logger.info(
            "cluster | a single process: the environment tells nothing of %s",
            ", ".join(RESOLVERS),
        )
        return SimpleClusterResolver(ClusterSpec({}))
    chosen, *others = present
    resolver = RESOLVERS[chosen](environ=environ)
    plan = resolver.process_plan()
    place = "a single process"
    if plan.is_distributed:
        place = f"process {plan.process_id} of {plan.num_processes}"
        place += f", coordinator {plan.coordinator_address}"
    task = f"{plan.task_type} {plan.task_id}"
    note = f" | comes before {', '.join(others)}" if others else ""
    logger.info("cluster | from %s: %s, %s%s", chosen, task, place, note)
    return resolver
