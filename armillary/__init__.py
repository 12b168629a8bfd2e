"""Training loops around a compiled step.

The outer ring (`Controller`) saves, evaluates, logs and recovers. The inner ring
(`StandardTrainer`, `StandardEvaluator`) runs many steps in one device program. The
centre is the user's own step, which a `Strategy` spreads over devices without changing
it::

    class Trainer(armillary.StandardTrainer):
        def __init__(self):
            super().__init__(dataset)
            self.model, self.optimizer = model, optimizer

        def train_step(self, iterator):
            def step_fn(batch):
                grads = nnx.grad(loss_fn)(self.model, batch)  # this replica's
                grads = armillary.all_reduce("mean", grads)  # of all replicas
                self.optimizer.update(self.model, grads)

            strategy.run(step_fn, args=(next(iterator),))

    controller = armillary.Controller(
        trainer=Trainer(), global_step=optimizer.step, steps_per_loop=100
    )
    controller.train(steps=5000)
"""

import importlib.util
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from armillary import (
        actions,
        cluster,
        data,
        distribute,
        errors,
        estimator,
        goodput,
        keras,
        launch,
        metrics,
        plan,
        summary,
        testing,
        xla,
    )
    from armillary.checkpoint import Checkpoint, CheckpointManager
    from armillary.controller import Controller
    from armillary.distribute import (
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        OneDeviceStrategy,
        ShardedStrategy,
        TPUStrategy,
        VariableAggregation,
        VariableSynchronization,
        all_reduce,
        all_reduce_gradients,
        compute_average_loss,
        create_global_step,
        function,
        get_replica_context,
        get_strategy,
        over_replicas,
        scale_regularization_loss,
        value_and_grad,
        weighted_mean,
    )
    from armillary.parameter_server import ParameterServerStrategy
    from armillary.state._summarize import summarize
    from armillary.trainer import (
        AbstractEvaluator,
        AbstractTrainer,
        StandardEvaluator,
        StandardEvaluatorOptions,
        StandardTrainer,
        StandardTrainerOptions,
        StepEvaluator,
        StepTrainer,
        predict,
    )

__version__ = "0.3.0"

__all__ = [
    "AbstractEvaluator",
    "AbstractTrainer",
    "Checkpoint",
    "CheckpointManager",
    "Controller",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ShardedStrategy",
    "StandardEvaluator",
    "StandardEvaluatorOptions",
    "StandardTrainer",
    "StandardTrainerOptions",
    "StepEvaluator",
    "StepTrainer",
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
    "keras",
    "launch",
    "metrics",
    "over_replicas",
    "plan",
    "predict",
    "scale_regularization_loss",
    "summarize",
    "summary",
    "testing",
    "value_and_grad",
    "weighted_mean",
    "xla",
]


# Where the names of `__all__` that are no packages are found, from the bottom up.
_HOMES = [
    "state._summarize",
    "distribute",
    "parameter_server",
    "checkpoint",
    "trainer",
    "controller",
]
# Names that stood here before, and the package that has each now.
_MOVED = {
    **dict.fromkeys(("CentralStorageStrategy", "DefaultStrategy"), "distribute"),
    "ReduceOp": "distribute",
    **dict.fromkeys(("has_strategy", "in_cross_replica_context"), "distribute"),
    **dict.fromkeys(("make_distributed_dataset", "set_strategy"), "distribute"),
    **dict.fromkeys(("InputContext", "InputOptions"), "data"),
    **dict.fromkeys(("History", "RunOutput"), "controller"),
    "Action": "typing",
    "Output": "typing",
    "PendingLoops": "trainer",
}


def __getattr__(name: str) -> Any:
    """Imports what a name stands for when it is first used.

    So `armillary launch` starts without JAX, and Flax and Keras are imported for
    `armillary.metrics`, `armillary.estimator` and `armillary.keras` alone.

    Raises:
        AttributeError: If there is no such name; of one that has moved, where it is.
    """
    if not name.startswith("_") and importlib.util.find_spec(f"armillary.{name}"):
        return importlib.import_module(f"armillary.{name}")
    for home in _HOMES if name in __all__ else ():
        module = importlib.import_module(f"armillary.{home}")
        if name in vars(module):
            globals()[name] = vars(module)[name]
            return vars(module)[name]
    text = f"module {__name__!r} has no attribute {name!r}"
    if home := _MOVED.get(name):
        text += f": it has moved. Write `armillary.{home}.{name}`."
    raise AttributeError(text)


def __dir__() -> list[str]:
    """Returns the names that are imported, and those that will be."""
    packages = {module.name for module in pkgutil.iter_modules(__path__)}
    return sorted({*globals(), *__all__, *packages})
