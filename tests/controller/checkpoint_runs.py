"""A trainer that saves, and its controller."""

from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from armillary import AbstractEvaluator, AbstractTrainer, Controller
from armillary.checkpoint import Checkpoint, CheckpointManager


class Run(AbstractTrainer, AbstractEvaluator):
    """A job whose state is a step and a sum of all steps."""

    def __init__(self, fail_at=None):
        self.step = nnx.Variable(jnp.zeros((), jnp.int32))
        self.total = nnx.Variable(jnp.zeros((), jnp.int32))
        self.fail_at = fail_at
        self.num_loops = 0
        self.evaluated = []

    def train(self, num_steps):
        for _ in range(num_steps):
            self.step.set_value(self.step.get_value() + 1)
            self.total.set_value(self.total.get_value() + self.step.get_value())
            if self.step.get_value() == self.fail_at:
                raise RuntimeError("out of memory")
        self.num_loops += 1
        return {"total": self.total.get_value()}

    def evaluate(self, num_steps):
        self.evaluated.append(int(self.step.get_value()))
        return {"total": self.total.get_value()}


def make_controller(run, directory, manager_options=None, objects=None, **options):
    checkpoint = Checkpoint(step=run.step, total=run.total, **(objects or {}))
    manager = CheckpointManager(
        checkpoint, directory, **{"checkpoint_interval": 4, **(manager_options or {})}
    )
    return Controller(
        trainer=run,
        evaluator=run,
        global_step=run.step,
        steps_per_loop=2,
        checkpoint_manager=manager,
        **options,
    )


def saved_steps(controller):
    manager = controller.checkpoint_manager
    names = [Path(path).name for path in manager.checkpoints]
    return [int(name.removeprefix("checkpoint_").partition(".")[0]) for name in names]
