"""The choice of a resolver for a program that names none."""

from typing import Protocol

from armillary._logging import ensure_visible, logger
from armillary.cluster.resolvers._resolver import (
    ClusterResolver,
    Environ,
    SimpleClusterResolver,
    find_environ,
)
from armillary.cluster.resolvers._schedulers import (
    KubernetesClusterResolver,
    SlurmClusterResolver,
    TorchrunClusterResolver,
)
from armillary.cluster.resolvers._spec import ClusterSpec, ProcessPlan
from armillary.cluster.resolvers._tf_config import TFConfigClusterResolver
from armillary.cluster.resolvers._tpu import TPUClusterResolver


class _ResolverType(Protocol):
    """The methods that all resolvers below share."""

    def is_present(self, environ: Environ) -> bool: ...
    def __call__(self, *, environ: Environ) -> ClusterResolver: ...


# ORDER: what a person or a launcher wrote on purpose comes before what a scheduler sets
# in every process. All processes of a job must choose the same.
RESOLVERS: dict[str, _ResolverType] = {
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
    note = f" | comes before {', '.join(others)}" if others else ""
    plan = resolver.process_plan()
    logger.info("cluster | from %s: %s%s", chosen, _describe(plan), note)
    return resolver


def _describe(plan: ProcessPlan) -> str:
    task = f"{plan.task_type} {plan.task_id}"
    if not plan.is_distributed:
        return f"{task}, a single process"
    return (
        f"{task}, process {plan.process_id} of {plan.num_processes}, "
        f"coordinator {plan.coordinator_address}"
    )
