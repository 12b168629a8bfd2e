"""A training program with every kind of state, for the soak test to kill.

    python -m tests.checkpoint.soak_program RUN_DIR NUM_STEPS

It prints a line after each loop and, if it gets that far, writes digests of its final
state to `RUN_DIR/final.json`.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import armillary
from armillary.data import from_arrays
from tests.problems import MLP, make_digits, make_strategy, read_state

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


def train(
    strategy: Any,
    directory: Path,
    num_steps: int,
    report: Callable[[int], None],
    model: Any = None,
) -> dict[str, Any]:
    """Trains, from the latest checkpoint on; returns digests of the final state."""
    trainer = Trainer(strategy, num_steps, model)
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=strategy,
        steps_per_loop=STEPS_PER_LOOP,
        train_actions=[lambda _: report(int(trainer.optimizer.step[...]))],
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer, data=trainer.train_dataset),
            directory / "checkpoints",
            max_to_keep=2,
            checkpoint_interval=SAVE_INTERVAL,
        ),
    )
    report(int(trainer.optimizer.step[...]))
    controller.train(num_steps)
    final: dict[str, Any] = {
        path: hashlib.sha256(array.tobytes()).hexdigest()
        for path, array in read_state(trainer).items()
    }
    final["data"] = trainer.train_dataset.get_state()
    final["seen"] = trainer.seen.tolist()
    final["trace"] = trainer.losses.tolist()
    return final


def main(directory: str, num_steps: int) -> None:
    """Trains on two devices, and writes down how it ended."""
    armillary.xla.use_compilation_cache(Path(directory).parent / "compiled")

    def report(step: int) -> None:
        print(step, flush=True)  # noqa: T201

    final = train(make_strategy(2), Path(directory), num_steps, report)
    (Path(directory) / "final.json").write_text(json.dumps(final))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
