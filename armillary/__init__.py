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

from armillary.advice._foreign_names import refuse_name as _refuse_name
from armillary.state._adapters import register as _register

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
        lora,
        metrics,
        plan,
        pretrained,
        summary,
        testing,
        utils,
        xla,
    )
    from armillary.checkpoint import Checkpoint, CheckpointManager
    from armillary.controller import Controller
    from armillary.data import InputContext, InputOptions
    from armillary.distribute import (
        CentralStorageStrategy,
        DefaultStrategy,
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        OneDeviceStrategy,
        ReduceOp,
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
        has_strategy,
        in_cross_replica_context,
        make_distributed_dataset,
        over_replicas,
        scale_regularization_loss,
        set_strategy,
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
    from armillary.typing import Action, Output

__version__ = "0.4.0.dev0"

__all__ = [
    "AbstractEvaluator",
    "AbstractTrainer",
    "Action",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointManager",
    "Controller",
    "DefaultStrategy",
    "InputContext",
    "InputOptions",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "Output",
    "ParameterServerStrategy",
    "ReduceOp",
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
    "has_strategy",
    "in_cross_replica_context",
    "keras",
    "launch",
    "lora",
    "make_distributed_dataset",
    "metrics",
    "over_replicas",
    "plan",
    "predict",
    "pretrained",
    "scale_regularization_loss",
    "set_strategy",
    "summarize",
    "summary",
    "testing",
    "utils",
    "value_and_grad",
    "weighted_mean",
    "xla",
]


# The libraries whose variables a step may use. An object of two libraries, such as a
# Keras variable that is an NNX variable, counts as the first one.
_register("flax", "armillary.state._nnx")
_register("keras", "armillary.keras._variables")

# The packages that hold the other names of `__all__`, from the bottom up.
_HOMES = [
    "typing",
    "data",
    "state._summarize",
    "distribute",
    "parameter_server",
    "checkpoint",
    "trainer",
    "controller",
]


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used.

    Therefore `armillary launch` starts without JAX, and only `armillary.metrics`,
    `armillary.lora`, `armillary.estimator` and `armillary.keras` import Flax and Keras.

    Raises:
        AttributeError: If there is no such name. The message says what to write
            instead of a name of TensorFlow or Orbit.
    """
    is_public = name.isidentifier() and not name.startswith("_")
    if is_public and importlib.util.find_spec(f"armillary.{name}"):
        return importlib.import_module(f"armillary.{name}")
    for home in _HOMES if name in __all__ else ():
        module = importlib.import_module(f"armillary.{home}")
        if name in vars(module):
            globals()[name] = vars(module)[name]
            return vars(module)[name]
    _refuse_name(__name__, name)


def __dir__() -> list[str]:
    """Returns the names that are imported, and the names that can be imported."""
    packages = {module.name for module in pkgutil.iter_modules(__path__)}
    return sorted({*globals(), *__all__, *packages})
