"""Where a process is: which one, of how many, and where the others are.

A `ClusterResolver` reads what a scheduler tells each process in its environment, and
makes a `ProcessPlan`, which is what `jax.distributed.initialize` needs. Without a
resolver of your own, `resolve_cluster` chooses one::

    resolver = armillary.cluster.resolve_cluster()
    plan = resolver.process_plan()
    if plan.is_distributed:
        jax.distributed.initialize(**plan.initialize_arguments())

The classes and their names are those of `tf.distribute.cluster_resolver`. Nothing here
uses a device, opens a connection or changes a setting of JAX.
"""

from armillary._process import ExitCode
from armillary._traceback import mark_public as _mark_public
from armillary.cluster._communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from armillary.cluster._preemption import TerminationConfig
from armillary.cluster.resolvers._resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)
from armillary.cluster.resolvers._schedulers import (
    KubernetesClusterResolver,
    SlurmClusterResolver,
    TorchrunClusterResolver,
    TPUClusterResolver,
    resolve_cluster,
)
from armillary.cluster.resolvers._spec import ClusterSpec, ProcessPlan

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ExitCode",
    "KubernetesClusterResolver",
    "ProcessPlan",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "TerminationConfig",
    "TorchrunClusterResolver",
    "resolve_cluster",
]

_mark_public(globals())
