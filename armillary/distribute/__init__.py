"""Strategies: how one step spreads over devices, without changing it.

    strategy                      replicas             state
    `DefaultStrategy`             1                    where it is
    `OneDeviceStrategy(device)`   1                    on that device
    `MirroredStrategy(devices)`   one per device       a copy on each device
    `MultiWorkerMirroredStrategy` one per device of    a copy on each device
                                  all processes

`_strategy` is the base. Below it, `_replicas` maps a function over replicas,
`_variables` says what that means for each slot, `_collectives` is what a replica can
do. `_function` compiles a step, `_trace` makes it pure, `_placement` holds its state on
the devices.
"""

from armillary.distribute._agreement import largest_on_replicas as largest_on_replicas
from armillary.distribute._collectives import ReplicaContext as ReplicaContext
from armillary.distribute._context import entered as entered
from armillary.distribute._context import get_replica_context as get_replica_context
from armillary.distribute._context import get_strategy as get_strategy
from armillary.distribute._context import has_strategy as has_strategy
from armillary.distribute._context import (
    in_cross_replica_context as in_cross_replica_context,
)
from armillary.distribute._context import lifted as lifted
from armillary.distribute._context import set_strategy as set_strategy
from armillary.distribute._divergence import ReplicaComparison as ReplicaComparison
from armillary.distribute._divergence import check_equal as check_equal
from armillary.distribute._function import function as function
from armillary.distribute._global_arrays import as_local as as_local
from armillary.distribute._global_arrays import replicate as replicate
from armillary.distribute._interrupts import uninterrupted as uninterrupted
from armillary.distribute._loss import compute_average_loss as compute_average_loss
from armillary.distribute._loss import (
    scale_regularization_loss as scale_regularization_loss,
)
from armillary.distribute._make_dataset import (
    make_distributed_dataset as make_distributed_dataset,
)
from armillary.distribute._mirrored import MirroredStrategy as MirroredStrategy
from armillary.distribute._multi_worker import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from armillary.distribute._placement import Placement as Placement
from armillary.distribute._same_program import check_same_program as check_same_program
from armillary.distribute._single import DefaultStrategy as DefaultStrategy
from armillary.distribute._single import OneDeviceStrategy as OneDeviceStrategy
from armillary.distribute._strategy import Strategy as Strategy
from armillary.distribute._strategy import ValueContext as ValueContext
from armillary.distribute._trace import TracedStep as TracedStep
from armillary.distribute._trace import explained as explained
from armillary.distribute._trace import trace_step as trace_step
from armillary.distribute._values import PerReplica as PerReplica
from armillary.distribute._values import ReduceOp as ReduceOp
from armillary.distribute._values import is_per_replica as is_per_replica
from armillary.distribute._variables import VariableAggregation as VariableAggregation
from armillary.distribute._variables import (
    VariableSynchronization as VariableSynchronization,
)
from armillary.distribute._variables import create_global_step as create_global_step
from armillary.distribute._varying import corrected_types as corrected_types

__all__ = [
    "DefaultStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "PerReplica",
    "Placement",
    "ReduceOp",
    "ReplicaComparison",
    "ReplicaContext",
    "Strategy",
    "TracedStep",
    "ValueContext",
    "VariableAggregation",
    "VariableSynchronization",
    "as_local",
    "check_equal",
    "check_same_program",
    "compute_average_loss",
    "corrected_types",
    "create_global_step",
    "entered",
    "explained",
    "function",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "is_per_replica",
    "largest_on_replicas",
    "lifted",
    "make_distributed_dataset",
    "replicate",
    "scale_regularization_loss",
    "set_strategy",
    "trace_step",
    "uninterrupted",
]
