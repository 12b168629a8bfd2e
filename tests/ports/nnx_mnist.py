"""The tutorial of Flax NNX: a classifier of images with batch norm and dropout.

Objects hold the state, and `nnx.jit` compiles functions that change them.
"""

from typing import Any

import jax
import optax
from flax import nnx

import armillary
from tests.ports.port import (
    BATCH_SIZE,
    NUM_STEPS,
    Arrays,
    Port,
    Result,
    batches_of,
    keys_of_replicas,
    make_images,
    source_of,
)

TRAIN = make_images(NUM_STEPS * BATCH_SIZE)
TEST = make_images(21)
RATE = 0.02


class CNN(nnx.Module):
    """A convolutional classifier with every kind of state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        # A bias before batch norm would have a gradient of rounding errors alone, which
        # Adam makes steps of the usual size of.
        self.conv = nnx.Conv(1, 4, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.hidden = nnx.Linear(64, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3)
        self.output = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.avg_pool(x, (2, 2), (2, 2))
        x = nnx.relu(self.hidden(x.reshape(x.shape[0], -1)))
        return self.output(self.dropout(x, rngs=rngs))


def loss_fn(model: CNN, rngs: nnx.Rngs, batch: Any) -> tuple[jax.Array, jax.Array]:
    logits = model(batch["image"], rngs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), logits


def make_metrics() -> nnx.MultiMetric:
    return nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
    )


def run_original(num_replicas: int) -> Result:
    model, rngs = CNN(nnx.Rngs(0)), nnx.Rngs(1)
    optimizer = nnx.Optimizer(model, optax.adamw(RATE), wrt=nnx.Param)
    metrics = make_metrics()

    @nnx.jit
    def train_step(
        model: CNN,
        optimizer: nnx.Optimizer,
        metrics: nnx.MultiMetric,
        rngs: nnx.Rngs,
        batch: Arrays,
    ) -> None:
        grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        (loss, logits), grads = grad_fn(model, rngs, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    @nnx.jit
    def train_step_on_replicas(
        model: CNN,
        optimizer: nnx.Optimizer,
        metrics: nnx.MultiMetric,
        rngs: nnx.Rngs,
        batch: Arrays,
    ) -> None:
        # Each replica has its own dropout, and batch statistics of its own examples.
        graph, params, statistics = nnx.split(model, nnx.Param, ...)
        keys = keys_of_replicas(rngs["default"].key[...], num_replicas)
        count = rngs["default"].count[...]

        def loss_of_replica(params: Any, key: jax.Array, own: Any) -> Any:
            replica = nnx.merge(graph, params, statistics, copy=True)
            own_rngs = nnx.Rngs(key)
            own_rngs["default"].count[...] = count
            loss, logits = loss_fn(replica, own_rngs, own)
            return loss, (logits, nnx.state(replica, nnx.BatchStat))

        def loss_of_all(params: Any) -> Any:
            shares = jax.tree.map(
                lambda each: each.reshape(num_replicas, -1, *each.shape[1:]), batch
            )
            run = jax.vmap(loss_of_replica, in_axes=(None, 0, 0))
            losses, (logits, own) = run(params, keys, shares)
            mean = jax.tree.map(lambda each: each.mean(axis=0), own)
            return losses.mean(), (logits.reshape(-1, logits.shape[-1]), mean)

        grad_fn = jax.value_and_grad(loss_of_all, has_aux=True)
        (loss, (logits, mean)), grads = grad_fn(params)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)
        nnx.update(model, mean)
        rngs["default"].count[...] = count + 1

    @nnx.jit
    def eval_step(model: CNN, metrics: nnx.MultiMetric, batch: Arrays) -> None:
        logits = model(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        metrics.update(loss=losses, logits=logits, labels=batch["label"])

    losses = []
    step = train_step if num_replicas == 1 else train_step_on_replicas
    for batch in batches_of(TRAIN):
        step(model, optimizer, metrics, rngs, batch)
        losses.append(float(metrics.compute()["loss"]))
        metrics.reset()

    model.eval()
    for start in range(0, 21, 8):
        batch = {name: each[start : start + 8] for name, each in TEST.items()}
        eval_step(model, metrics, batch)
    return Result(losses, {k: float(v) for k, v in metrics.compute().items()})


class Trainer(armillary.StandardTrainer):
    """The training half of the loop."""

    def __init__(self, strategy: armillary.distribute.Strategy) -> None:
        super().__init__(source_of(TRAIN))
        self.strategy = strategy
        self.model, self.rngs = CNN(nnx.Rngs(0)), nnx.Rngs(1)
        self.optimizer = nnx.Optimizer(self.model, optax.adamw(RATE), wrt=nnx.Param)
        self.metrics = make_metrics()
        self.global_step = self.optimizer.step

    def train_loop_begin(self) -> None:
        self.metrics.reset()

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
            (loss, logits), grads = grad_fn(self.model, self.rngs, batch)
            grads = armillary.all_reduce("mean", grads)
            self.metrics.update(loss=loss, logits=logits, labels=batch["label"])
            self.optimizer.update(self.model, grads)

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self) -> armillary.typing.Output:
        return self.metrics.compute()


class Evaluator(armillary.StandardEvaluator):
    """The test half of the loop."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(armillary.data.from_arrays(TEST, batch_size=8))
        self.strategy = trainer.strategy
        self.model = nnx.view(
            trainer.model, deterministic=True, use_running_average=True
        )
        self.metrics = make_metrics()

    def eval_begin(self) -> None:
        self.metrics.reset()

    def eval_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            logits, labels = self.model(batch["image"]), batch["label"]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            self.metrics.update(loss=losses, logits=logits, labels=labels)

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self, *state: Any) -> armillary.typing.Output:
        return self.metrics.compute()


PORT = Port(run_original, Trainer, Evaluator)
