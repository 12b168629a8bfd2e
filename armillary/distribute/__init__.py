"""Strategies: how one step spreads over devices, without changing it.

Which one to take::

    strategy                    replicas             state
    DefaultStrategy             1                    where it is
    OneDeviceStrategy(device)   1                    on that device
    MirroredStrategy(devices)   one per device       a copy on each device
    MultiWorkerMirroredStrategy one per device of    a copy on each device
                                all processes
    TPUStrategy                 one per TPU core     a copy on each core
    CentralStorageStrategy      one per device       in one place, and a copy on each
                                                     device while a program runs
    ShardedStrategy(mesh_shape) 1, over all devices  a part on each device
    ParameterServerStrategy     1 on each worker     on parameter servers

`_strategy` is the base, and `strategies` holds those above. `program` makes a device
program of a step, and `replica` is what holds inside `run`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from armillary._traceback import mark_public as _mark_public
from armillary.distribute._strategy import Strategy as Strategy
from armillary.distribute._strategy import ValueContext as ValueContext
from armillary.distribute.program._function import function as function
from armillary.distribute.replica._collectives import ReplicaContext as ReplicaContext
from armillary.distribute.replica._context import (
    get_replica_context as get_replica_context,
)
from armillary.distribute.replica._context import get_strategy as get_strategy
from armillary.distribute.replica._context import has_strategy as has_strategy
from armillary.distribute.replica._context import (
    in_cross_replica_context as in_cross_replica_context,
)
from armillary.distribute.replica._context import set_strategy as set_strategy
from armillary.distribute.replica._gradient import (
    value_and_grad as value_and_grad,
)
from armillary.distribute.replica._loss import (
    compute_average_loss as compute_average_loss,
)
from armillary.distribute.replica._loss import (
    scale_regularization_loss as scale_regularization_loss,
)
from armillary.distribute.replica._loss import weighted_mean as weighted_mean
from armillary.distribute.replica._policy import (
    VariableAggregation as VariableAggregation,
)
from armillary.distribute.replica._policy import (
    VariableSynchronization as VariableSynchronization,
)
from armillary.distribute.replica._policy import (
    create_global_step as create_global_step,
)
from armillary.distribute.replica._reductions import (
    CrossDeviceOps as CrossDeviceOps,
)
from armillary.distribute.replica._reductions import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from armillary.distribute.replica._reductions import (
    NcclAllReduce as NcclAllReduce,
)
from armillary.distribute.replica._reductions import (
    ReductionToOneDevice as ReductionToOneDevice,
)
from armillary.distribute.replica._reductions import all_reduce as all_reduce
from armillary.distribute.replica._reductions import (
    all_reduce_gradients as all_reduce_gradients,
)
from armillary.distribute.replica._reductions import over_replicas as over_replicas
from armillary.distribute.replica._values import PerReplica as PerReplica
from armillary.distribute.replica._values import ReduceOp as ReduceOp
from armillary.distribute.replica._values import is_per_replica as is_per_replica
from armillary.distribute.strategies._make_dataset import (
    make_distributed_dataset as make_distributed_dataset,
)
from armillary.distribute.strategies._multi_worker import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from armillary.distribute.strategies._multi_worker import TPUStrategy as TPUStrategy
from armillary.distribute.strategies._sharded import ShardedStrategy as ShardedStrategy
from armillary.distribute.strategies._single import (
    CentralStorageStrategy as CentralStorageStrategy,
)
from armillary.distribute.strategies._single import DefaultStrategy as DefaultStrategy
from armillary.distribute.strategies._single import (
    MirroredStrategy as MirroredStrategy,
)
from armillary.distribute.strategies._single import (
    OneDeviceStrategy as OneDeviceStrategy,
)

if TYPE_CHECKING:
    from armillary.distribute import coordinator as coordinator
    from armillary.distribute import partitioners as partitioners
    from armillary.parameter_server import (
        ParameterServerStrategy as ParameterServerStrategy,
    )

__all__ = [
    "CentralStorageStrategy",
    "CrossDeviceOps",
    "DefaultStrategy",
    "HierarchicalCopyAllReduce",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "ShardedStrategy",
    "Strategy",
    "TPUStrategy",
    "ValueContext",
    "VariableAggregation",
    "VariableSynchronization",
    "all_reduce",
    "all_reduce_gradients",
    "compute_average_loss",
    "coordinator",
    "create_global_step",
    "function",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "is_per_replica",
    "make_distributed_dataset",
    "over_replicas",
    "partitioners",
    "scale_regularization_loss",
    "set_strategy",
    "value_and_grad",
    "weighted_mean",
]

_mark_public(globals())


def __getattr__(name: str) -> Any:
    """Imports what is of parameter servers when it is first used, and Optax with it.

    Raises:
        AttributeError: For any other name.
    """
    if name in ("coordinator", "partitioners"):
        return importlib.import_module(f"armillary.distribute.{name}")
    if name == "ParameterServerStrategy":
        return importlib.import_module("armillary.parameter_server").__dict__[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
