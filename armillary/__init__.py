"""Training loops around a compiled step.

The outer ring (`Controller`) saves, evaluates, logs and recovers. The inner ring
(`StandardTrainer`, `StandardEvaluator`) runs many steps in one device program. The
centre is the user's own step, which a `Strategy` spreads over devices without changing
it::

    strategy = armillary.MirroredStrategy()
    dataset = armillary.make_distributed_dataset(strategy, make_data)

    class Trainer(armillary.StandardTrainer):
        def __init__(self):
            super().__init__(dataset)
            self.strategy, self.model, self.optimizer = strategy, model, optimizer

        def train_step(self, iterator):
            def step_fn(batch):
                def loss_fn(model):
                    return jnp.mean(losses(model, batch))

                grads = nnx.grad(loss_fn)(self.model)  # this replica's
                grads = armillary.all_reduce("mean", grads)  # of all replicas
                self.optimizer.update(self.model, grads)

            self.strategy.run(step_fn, args=(next(iterator),))

    controller = armillary.Controller(
        trainer=Trainer(), global_step=optimizer.step, steps_per_loop=100
    )
    controller.train(steps=5000)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from armillary import actions as actions
    from armillary import cluster as cluster
    from armillary import data as data
    from armillary import distribute as distribute
    from armillary import errors as errors
    from armillary import estimator as estimator
    from armillary import goodput as goodput
    from armillary import keras as keras
    from armillary import launch as launch
    from armillary import metrics as metrics
    from armillary import plan as plan
    from armillary import summary as summary
    from armillary import testing as testing
    from armillary import xla as xla
    from armillary.checkpoint import Checkpoint as Checkpoint
    from armillary.checkpoint import CheckpointManager as CheckpointManager
    from armillary.controller._controller import Controller as Controller
    from armillary.controller._outputs import History as History
    from armillary.controller._outputs import RunOutput as RunOutput
    from armillary.data import InputContext as InputContext
    from armillary.data import InputOptions as InputOptions
    from armillary.distribute import CentralStorageStrategy as CentralStorageStrategy
    from armillary.distribute import DefaultStrategy as DefaultStrategy
    from armillary.distribute import MirroredStrategy as MirroredStrategy
    from armillary.distribute import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from armillary.distribute import OneDeviceStrategy as OneDeviceStrategy
    from armillary.distribute import ReduceOp as ReduceOp
    from armillary.distribute import ShardedStrategy as ShardedStrategy
    from armillary.distribute import TPUStrategy as TPUStrategy
    from armillary.distribute import VariableAggregation as VariableAggregation
    from armillary.distribute import VariableSynchronization as VariableSynchronization
    from armillary.distribute import all_reduce as all_reduce
    from armillary.distribute import all_reduce_gradients as all_reduce_gradients
    from armillary.distribute import compute_average_loss as compute_average_loss
    from armillary.distribute import create_global_step as create_global_step
    from armillary.distribute import function as function
    from armillary.distribute import get_replica_context as get_replica_context
    from armillary.distribute import get_strategy as get_strategy
    from armillary.distribute import has_strategy as has_strategy
    from armillary.distribute import (
        in_cross_replica_context as in_cross_replica_context,
    )
    from armillary.distribute import (
        make_distributed_dataset as make_distributed_dataset,
    )
    from armillary.distribute import over_replicas as over_replicas
    from armillary.distribute import (
        scale_regularization_loss as scale_regularization_loss,
    )
    from armillary.distribute import set_strategy as set_strategy
    from armillary.distribute import value_and_grad as value_and_grad
    from armillary.distribute import weighted_mean as weighted_mean
    from armillary.parameter_server import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from armillary.state._summarize import summarize as summarize
    from armillary.trainer._contract import AbstractEvaluator as AbstractEvaluator
    from armillary.trainer._contract import AbstractTrainer as AbstractTrainer
    from armillary.trainer._contract import PendingLoops as PendingLoops
    from armillary.trainer._epoch_helper import EpochHelper as EpochHelper
    from armillary.trainer._moving_average import (
        ExponentialMovingAverage as ExponentialMovingAverage,
    )
    from armillary.trainer._options import (
        StandardEvaluatorOptions as StandardEvaluatorOptions,
    )
    from armillary.trainer._options import (
        StandardTrainerOptions as StandardTrainerOptions,
    )
    from armillary.trainer._predict import predict as predict
    from armillary.trainer._standard_evaluator import (
        StandardEvaluator as StandardEvaluator,
    )
    from armillary.trainer._standard_trainer import StandardTrainer as StandardTrainer
    from armillary.typing import Action as Action
    from armillary.typing import Output as Output

__version__ = "0.1.0"

__all__ = [
    "AbstractEvaluator",
    "AbstractTrainer",
    "Action",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointManager",
    "Controller",
    "DefaultStrategy",
    "EpochHelper",
    "ExponentialMovingAverage",
    "History",
    "InputContext",
    "InputOptions",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "Output",
    "ParameterServerStrategy",
    "PendingLoops",
    "ReduceOp",
    "RunOutput",
    "ShardedStrategy",
    "StandardEvaluator",
    "StandardEvaluatorOptions",
    "StandardTrainer",
    "StandardTrainerOptions",
    "TPUStrategy",
    "VariableAggregation",
    "VariableSynchronization",
    "actions",
    "all_reduce",
    "all_reduce_gradients",
    "cluster",
    "compute_average_loss",
    "create_global_step",
    "data",
    "distribute",
    "errors",
    "estimator",
    "function",
    "get_replica_context",
    "get_strategy",
    "goodput",
    "has_strategy",
    "in_cross_replica_context",
    "keras",
    "launch",
    "make_distributed_dataset",
    "metrics",
    "over_replicas",
    "plan",
    "predict",
    "scale_regularization_loss",
    "set_strategy",
    "summarize",
    "summary",
    "testing",
    "value_and_grad",
    "weighted_mean",
    "xla",
]


# Where the names of `__all__` that are no packages are found, from the bottom up.
_HOMES = (
    "typing",
    "state._summarize",
    "data",
    "distribute",
    "parameter_server",
    "checkpoint",
    "trainer",
    "trainer._epoch_helper",
    "controller",
    "trainer._moving_average",
)
_PACKAGES = (
    "actions",
    "checkpoint",
    "cluster",
    "controller",
    "data",
    "distribute",
    "errors",
    "estimator",
    "goodput",
    "keras",
    "launch",
    "lifeline",
    "metrics",
    "plan",
    "state",
    "summary",
    "testing",
    "trainer",
    "typing",
    "xla",
)


def __getattr__(name: str) -> Any:
    """Imports what a name stands for when it is first used.

    So `armillary launch` starts without JAX, and Flax and Keras are imported for
    `armillary.metrics`, `armillary.estimator`, `armillary.keras` and
    `ExponentialMovingAverage` alone.

    Raises:
        AttributeError: If there is no such name.
    """
    if name in _PACKAGES:
        return importlib.import_module(f"armillary.{name}")
    if name in __all__:
        modules = (importlib.import_module(f"armillary.{home}") for home in _HOMES)
        value = next(vars(each)[name] for each in modules if name in vars(each))
        globals()[name] = value
        return value
    hint = (
        ". What `orbit.utils` has is in `armillary` itself: `armillary.EpochHelper`"
        if name == "utils"
        else ""
    )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    """Returns the names that are imported, and those that will be."""
    return sorted({*globals(), *__all__, *_PACKAGES})
