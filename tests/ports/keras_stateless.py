"""The loop of the guide of Keras for JAX: `stateless_call` and `stateless_apply`."""

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

import armillary
from tests.ports.port import (
    BATCH_SIZE,
    NUM_STEPS,
    Port,
    Result,
    batches_of,
    make_images,
    on_replicas,
    source_of,
)

TRAIN = make_images(NUM_STEPS * BATCH_SIZE)
TEST = make_images(21)


class Program:
    """The model, its optimizer and a metric, and the step with their values."""

    def __init__(self) -> None:
        keras.utils.set_random_seed(0)
        self.model: Any = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Flatten(),
                keras.layers.Dense(8, use_bias=False),
                keras.layers.BatchNormalization(momentum=0.9),
                keras.layers.ReLU(),
                keras.layers.Dense(3),
            ]
        )
        self.optimizer = keras.optimizers.Adam(0.01)
        self.optimizer.build(self.model.trainable_variables)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.metric = keras.metrics.SparseCategoricalAccuracy()

    def make_state(self) -> tuple[Any, ...]:
        variables = (
            self.model.trainable_variables,
            self.model.non_trainable_variables,
            self.optimizer.variables,
            self.metric.variables,
        )
        return tuple([each.value for each in group] for group in variables)

    def loss_and_updates(
        self, trainable: Any, others: Any, accuracy: Any, batch: Any
    ) -> Any:
        logits, others = self.model.stateless_call(
            trainable, others, batch["image"], training=True
        )
        accuracy = self.metric.stateless_update_state(accuracy, batch["label"], logits)
        return self.loss(batch["label"], logits), (others, accuracy)

    def train_step(self, state: Any, batch: Any, reduce: Any) -> Any:
        trainable, others, moments, accuracy = state
        grad_fn = jax.value_and_grad(self.loss_and_updates, has_aux=True)
        (loss, (others, accuracy)), grads = grad_fn(trainable, others, accuracy, batch)
        trainable, moments = self.optimizer.stateless_apply(
            moments, reduce(grads), trainable
        )
        return (trainable, others, moments, accuracy), loss

    def evaluate(self, state: Any, batch: Any) -> Any:
        logits, _ = self.model.stateless_call(
            state[0], state[1], batch["image"], training=False
        )
        return {"accuracy": logits.argmax(axis=-1) == batch["label"]}

    def read_accuracy(self, state: Any) -> float:
        """Returns the accuracy over all training batches."""
        return float(self.metric.stateless_result(state[3]))


def run_original(num_replicas: int) -> Result:
    program = Program()

    def train_step(state: Any, batch: Any) -> Any:
        # The statistics of the replicas' own examples are averaged, the counts summed.
        before = state[3]
        state, loss = program.train_step(
            state, batch, lambda grads: jax.lax.pmean(grads, "batch")
        )
        trainable, others, moments, accuracy = state
        added = jax.tree.map(jnp.subtract, accuracy, before)
        added = jax.lax.psum(added, "batch")
        others, loss = jax.lax.pmean((others, loss), "batch")
        accuracy = jax.tree.map(jnp.add, before, added)
        return (trainable, others, moments, accuracy), loss

    compiled = on_replicas(train_step, num_replicas)
    state, losses = program.make_state(), []
    for batch in batches_of(TRAIN):
        state, loss = compiled(state, batch)
        losses.append(float(loss))

    is_right = jax.jit(program.evaluate)(state, TEST)["accuracy"]
    evaluation = {
        "accuracy": float(np.mean(is_right)),
        "train_accuracy": program.read_accuracy(state),
    }
    return Result(losses, evaluation)


def make_trainer(strategy: armillary.distribute.Strategy) -> armillary.StepTrainer:
    program = Program()

    def train_step(state: Any, batch: Any) -> Any:
        state, loss = program.train_step(
            state, batch, lambda grads: armillary.all_reduce("mean", grads)
        )
        return state, {"loss": loss}

    return armillary.StepTrainer(
        train_step, program.make_state(), source_of(TRAIN), strategy=strategy
    )


def make_evaluator(trainer: armillary.StepTrainer) -> armillary.StepEvaluator:
    program = Program()

    def add_train_accuracy(metrics: Any, state: Any) -> dict[str, float]:
        return {"train_accuracy": program.read_accuracy(state)}

    data = armillary.data.from_arrays(TEST, batch_size=8)
    return armillary.StepEvaluator(
        program.evaluate, trainer, data, loop_end=add_train_accuracy
    )


PORT = Port(run_original, make_trainer, make_evaluator)
