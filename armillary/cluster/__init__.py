"""Finds the place of a process in its job, and joins the process to the others.

A `ClusterResolver` reads the environment variables that a scheduler sets for each
process, and makes a `ProcessPlan`. The plan has all that `jax.distributed.initialize`
needs::

    plan = armillary.cluster.resolve_cluster().process_plan()
    if plan.is_distributed:
        jax.distributed.initialize(**plan.initialize_arguments())

A strategy of several processes does this itself (`_join.py`). It also sets the flags of
XLA, opens connections to the other processes, and starts their devices. Resolvers,
plans and options only read variables and check values. The names are the same as in
`tf.distribute.cluster_resolver`.
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
