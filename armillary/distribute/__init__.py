"""Strategies, which run one unchanged step on one or many devices.

`docs/devices/strategies.md` says which strategy to choose. `_strategy` is the base
class, and `strategies` holds the subclasses. `program` turns a step into a device
program, `replica` has the code that runs inside `run`, and `analysis` checks it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from armillary._traceback import mark_public as _mark_public
from armillary.advice._foreign_names import refuse_name as _refuse_name
from armillary.distribute._data_methods import ValueContext
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._function import function
from armillary.distribute.replica._context import (
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    set_strategy,
)
from armillary.distribute.replica._cross_device import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from armillary.distribute.replica._extended import StrategyExtended
from armillary.distribute.replica._gradient import value_and_grad
from armillary.distribute.replica._losses import (
    compute_average_loss,
    scale_regularization_loss,
    weighted_mean,
)
from armillary.distribute.replica._policy import (
    VariableAggregation,
    VariableSynchronization,
    create_global_step,
)
from armillary.distribute.replica._reductions import (
    all_reduce,
    all_reduce_gradients,
    over_replicas,
)
from armillary.distribute.replica._replica import ReplicaContext
from armillary.distribute.replica._values import PerReplica, ReduceOp, is_per_replica
from armillary.distribute.strategies._multi_worker import (
    MultiWorkerMirroredStrategy,
    TPUStrategy,
)
from armillary.distribute.strategies._sharded import ShardedStrategy
from armillary.distribute.strategies._single import (
    CentralStorageStrategy,
    DefaultStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    make_distributed_dataset,
)

if TYPE_CHECKING:
    from armillary.distribute import (
        cluster_resolver,
        coordinator,
        experimental,
        partitioners,
    )
    from armillary.parameter_server import ParameterServerStrategy

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
    "StrategyExtended",
    "TPUStrategy",
    "ValueContext",
    "VariableAggregation",
    "VariableSynchronization",
    "all_reduce",
    "all_reduce_gradients",
    "cluster_resolver",
    "compute_average_loss",
    "coordinator",
    "create_global_step",
    "experimental",
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

# These modules are imported when they are first used, because they import Optax.
_LATE_MODULES = ("cluster_resolver", "coordinator", "experimental", "partitioners")


def __getattr__(name: str) -> Any:
    """Imports a module or the strategy of parameter servers when it is first used.

    Raises:
        AttributeError: For any other name. The message says what to write instead of
            a name of `tf.distribute`.
    """
    if name in _LATE_MODULES:
        return importlib.import_module(f"armillary.distribute.{name}")
    if name == "ParameterServerStrategy":
        return importlib.import_module("armillary.parameter_server").__dict__[name]
    _refuse_name(__name__, name)


_mark_public(globals())
