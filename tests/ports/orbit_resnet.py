"""A program of Orbit's: one Keras class that trains and evaluates, by epochs.

Its loss is the sum over a replica's examples divided by the global batch, and the
penalty divided by the number of replicas, so that gradients are summed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax

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
STEPS_PER_EPOCH = 2


def make_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    penalty = keras.regularizers.L2(1e-3)
    image = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(
        4, 3, padding="same", use_bias=False, kernel_regularizer=penalty
    )(image)
    y = keras.layers.ReLU()(keras.layers.BatchNormalization(momentum=0.9)(x))
    y = keras.layers.Conv2D(
        4, 3, padding="same", use_bias=False, kernel_regularizer=penalty
    )(y)
    x = keras.layers.ReLU()(keras.layers.Add()([x, y]))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, keras.layers.Dense(3)(x))


def make_optimizer(model: keras.Model) -> keras.optimizers.Optimizer:
    rates = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.2, 0.1])
    optimizer = keras.optimizers.SGD(rates, momentum=0.9)
    optimizer.build(model.trainable_variables)
    return optimizer


def run_original(num_replicas: int) -> Result:
    model: Any = make_model()
    optimizer = make_optimizer(model)

    def train_step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
        trainable, others, momentum = state

        def loss_fn(trainable: Any) -> Any:
            logits, new, penalties = model.stateless_call(
                trainable, others, images, training=True, return_losses=True
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            loss = jnp.sum(losses) / BATCH_SIZE + sum(penalties) / num_replicas
            return loss, new

        (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(trainable)
        grads = jax.lax.psum(grads, "batch")
        trainable, momentum = optimizer.stateless_apply(momentum, grads, trainable)
        # Each replica normalizes its own examples, and the running means are averaged.
        # The program shows the mean of the replicas' parts of the loss.
        new, loss = jax.lax.pmean((new, loss), "batch")
        return (trainable, new, momentum), loss

    compiled = on_replicas(train_step, num_replicas)
    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
    )
    state = jax.tree.map(lambda each: each.value, [*map(list, variables)])
    state, losses = tuple(state), []
    of_epoch: list[float] = []
    for number, batch in enumerate(batches_of(TRAIN)):
        # The program shows the mean over the steps of the epoch so far.
        if number % STEPS_PER_EPOCH == 0:
            of_epoch.clear()
        state, loss = compiled(state, batch["image"], batch["label"])
        of_epoch.append(float(loss))
        losses.append(float(np.mean(of_epoch)))

    @jax.jit
    def predict(trainable: Any, others: Any, images: jax.Array) -> jax.Array:
        return model.stateless_call(trainable, others, images, training=False)[0]

    logits = predict(state[0], state[1], TEST["image"])
    accuracy = np.mean(np.argmax(logits, axis=-1) == TEST["label"])
    return Result(losses, {"accuracy": float(accuracy)})


class Resnet(armillary.StandardTrainer, armillary.StandardEvaluator):
    """The trainer and the evaluator of the program."""

    def __init__(self, strategy: armillary.distribute.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = make_model()
            self.optimizer = make_optimizer(self.model)
        self.train_loss = keras.metrics.Mean(name="train_loss")
        self.test_accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.global_step = armillary.create_global_step()
        self.epoch_helper = armillary.utils.EpochHelper(
            STEPS_PER_EPOCH, self.global_step
        )

        armillary.StandardTrainer.__init__(
            self, strategy.distribute_dataset(source_of(TRAIN))
        )
        test = armillary.data.from_arrays(TEST, batch_size=8)
        armillary.StandardEvaluator.__init__(self, strategy.distribute_dataset(test))

    def train_loop_begin(self) -> None:
        if self.epoch_helper.epoch_begin():
            self.train_loss.reset_state()

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            def loss_fn() -> jax.Array:
                logits = self.model(batch["image"], training=True)
                losses = keras.losses.sparse_categorical_crossentropy(
                    batch["label"], logits, from_logits=True
                )
                loss = jnp.sum(losses) / BATCH_SIZE
                num_replicas = self.strategy.num_replicas_in_sync
                return loss + sum(self.model.losses) / num_replicas

            variables = self.model.trainable_variables
            loss, grads = armillary.value_and_grad(loss_fn, variables)
            grads = armillary.all_reduce("sum", grads)
            self.optimizer.apply(grads, variables)
            self.train_loss.update_state(loss)

        self.strategy.run(step_fn, args=(next(iterator),))
        self.global_step[...] += 1

    def train_loop_end(self) -> armillary.typing.Output:
        self.epoch_helper.epoch_end()
        return {"loss": self.train_loss.result()}

    def eval_begin(self) -> None:
        self.test_accuracy.reset_state()

    def eval_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            logits = self.model(batch["image"], training=False)
            self.test_accuracy.update_state(batch["label"], logits)

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self, *state: Any) -> armillary.typing.Output:
        return {"accuracy": self.test_accuracy.result()}


PORT = Port(run_original, Resnet, lambda trainer: trainer)
