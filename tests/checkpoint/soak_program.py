"""A training program with every kind of state, for tests that kill it."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import armillary
from armillary.data import from_arrays
from tests.problems import MLP, make_digits, read_state

BATCH_SIZE = 12  # For two workers, or three.
NUM_EXAMPLES = 78
STEPS_PER_LOOP = 4
SAVE_INTERVAL = 8


class Plain(nnx.Module):
    """A classifier whose losses are the same on any number of replicas."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(64, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x.reshape(x.shape[0], -1))


class Trainer(armillary.StandardTrainer):
    """Trains a model with dropout and statistics, and notes each example it sees."""

    def __init__(self, strategy: Any, num_steps: int, model: Any = None) -> None:
        examples = {**make_digits(NUM_EXAMPLES), "id": jnp.arange(NUM_EXAMPLES)}
        source = from_arrays(
            examples, batch_size=BATCH_SIZE, shuffle_seed=3, repeat=True
        )
        super().__init__(
            strategy.distribute_dataset(source),
            armillary.StandardTrainerOptions(steps_per_chunk=3),
        )
        self.strategy = strategy
        self.model = model or MLP(nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(3e-3), wrt=nnx.Param)
        self.accuracy = nnx.metrics.Accuracy()
        self.seen = jnp.full((num_steps, BATCH_SIZE), -1)
        self.losses = jnp.zeros(num_steps)

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> tuple[jax.Array, jax.Array]:
            def loss_fn(model: Any) -> tuple[jax.Array, jax.Array]:
                logits = model(batch["image"])
                losses = optax.softmax_cross_entropy_with_integer_labels(
                    logits, batch["label"]
                )
                return armillary.compute_average_loss(losses), logits

            grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
            (loss, logits), grads = grad_fn(self.model)
            grads = armillary.all_reduce("sum", grads)
            self.optimizer.update(self.model, grads)
            self.accuracy.update(logits=logits, labels=batch["label"])
            return batch["id"], loss

        step = self.optimizer.step[...]
        ids, loss = self.strategy.run(step_fn, args=(next(iterator),))
        self.seen = self.seen.at[step].set(self.strategy.gather(ids, axis=0))
        self.losses = self.losses.at[step].set(self.strategy.reduce("sum", loss))


class Evaluator(armillary.StandardEvaluator):
    """Computes the loss of a trainer's model over the first examples."""

    def __init__(self, trainer: Trainer) -> None:
        source = from_arrays(make_digits(24), batch_size=BATCH_SIZE)
        super().__init__(trainer.strategy.distribute_dataset(source))
        self.strategy = trainer.strategy
        self.model = nnx.view(
            trainer.model, deterministic=True, use_running_average=True
        )
        self.loss = nnx.metrics.Average("loss")

    def eval_begin(self) -> None:
        self.loss.reset()

    def eval_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            losses = optax.softmax_cross_entropy_with_integer_labels(
                self.model(batch["image"]), batch["label"]
            )
            self.loss.update(loss=losses)

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self, *state: Any) -> dict[str, Any]:
        return {"loss": self.loss.compute()}


def train(
    strategy: Any,
    directory: Path,
    num_steps: int,
    report: Callable[[int], None],
    model: Any = None,
) -> dict[str, Any]:
    """Trains, from the latest checkpoint on; returns digests of the final state."""
    trainer = Trainer(strategy, num_steps, model)
    controller = make_controller(
        trainer,
        make_manager(trainer, directory),
        train_actions=[lambda _: report(int(trainer.optimizer.step[...]))],
    )
    report(int(trainer.optimizer.step[...]))
    controller.train(num_steps)
    return describe(trainer)


def make_manager(
    trainer: Trainer,
    directory: Path,
    options: Mapping[str, Any] = MappingProxyType({}),
    **others: Any,
) -> armillary.CheckpointManager:
    """Returns what saves the trainer, its data and whatever else is given."""
    return armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer, data=trainer.train_dataset, **others),
        directory / "checkpoints",
        max_to_keep=2,
        checkpoint_interval=SAVE_INTERVAL,
        **options,
    )


def make_controller(
    trainer: Trainer, manager: armillary.CheckpointManager, **options: Any
) -> armillary.Controller:
    """Returns a controller, which restores the latest checkpoint."""
    return armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=trainer.strategy,
        steps_per_loop=STEPS_PER_LOOP,
        checkpoint_manager=manager,
        **options,
    )


def describe(trainer: Trainer) -> dict[str, Any]:
    """Returns digests of a state, with all examples and losses so far."""
    final: dict[str, Any] = {
        path: hashlib.sha256(array.tobytes()).hexdigest()
        for path, array in read_state(trainer).items()
    }
    final["data"] = trainer.train_dataset.get_state()
    final["seen"] = trainer.seen.tolist()
    final["trace"] = trainer.losses.tolist()
    return final
