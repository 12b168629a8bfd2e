"""Self-distillation: a network predicts the output of a slowly following copy of it.

Both networks normalize the views of the global batch. The copy is state that no
optimizer changes, and a schedule of the step says how fast it follows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import armillary
from tests.ports.port import (
    BATCH_SIZE,
    NUM_STEPS,
    Port,
    Result,
    batches_of,
    keys_of_replicas,
    make_images,
    on_replicas,
    source_of,
)

TRAIN = make_images(NUM_STEPS * BATCH_SIZE)
WIDTH, FIRST_RATE = 8, 0.9
OPTIMIZER = optax.lars(0.3, weight_decay=1e-4, momentum=0.9)


class Network(nnx.Module):
    """Makes a projection of images, a prediction of it, and logits of classes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        # Batch norm takes the bias away.
        options: Any = {"use_bias": False, "rngs": rngs}
        self.encoder = nnx.Linear(64, 16, **options)
        self.norm = nnx.BatchNorm(16, axis_name="batch", rngs=rngs)
        self.projector = nnx.Linear(16, WIDTH, **options)
        self.predictor_norm = nnx.BatchNorm(WIDTH, axis_name="batch", rngs=rngs)
        self.predictor = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.classifier = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, image: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        hidden = self.encoder(image.reshape(image.shape[0], -1))
        embedding = nnx.relu(self.norm(hidden))
        projection = self.projector(embedding)
        prediction = self.predictor(nnx.relu(self.predictor_norm(projection)))
        logits = self.classifier(jax.lax.stop_gradient(embedding))
        return projection, prediction, logits


def distances(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the squared distance of vectors that are scaled to the length 1."""
    x, y = (each / jnp.linalg.norm(each, axis=-1, keepdims=True) for each in (x, y))
    return ((x - y) ** 2).sum(axis=-1)


def make_views(image: jax.Array, key: jax.Array) -> list[jax.Array]:
    """Returns two views: each image with other noise, and darker or lighter."""
    views: list[jax.Array] = []
    for view_key in jax.random.split(key):
        for_noise, for_light = jax.random.split(view_key)
        light = jax.random.uniform(for_light, (image.shape[0], 1, 1, 1), minval=0.6)
        views.append(light * image + 0.3 * jax.random.normal(for_noise, image.shape))
    return views


def loss_fn(online: Network, target: Network, batch: Any, key: jax.Array) -> jax.Array:
    first, last = make_views(batch["image"], key)
    _, first_prediction, logits = online(first)
    _, last_prediction, _ = online(last)
    aims = jax.lax.stop_gradient((target(first)[0], target(last)[0]))
    losses = distances(first_prediction, aims[1]) + distances(last_prediction, aims[0])
    of_classes = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return (losses + of_classes).mean()


def rate_of(step: jax.Array) -> jax.Array:
    """Returns the part of itself that the target keeps, which grows to 1."""
    return 1 - (1 - FIRST_RATE) * (jnp.cos(jnp.pi * step / NUM_STEPS) + 1) / 2


def follow(target: Any, online: Any, step: jax.Array) -> Any:
    """Returns the parameters of the target after a step."""
    keep = rate_of(step)
    return jax.tree.map(lambda own, new: own + (1 - keep) * (new - own), target, online)


def run_original(num_replicas: int) -> Result:
    graph, params, statistics = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)
    _, target_params, target_statistics = nnx.split(
        Network(nnx.Rngs(1)), nnx.Param, ...
    )
    state = {
        "online": (params, statistics),
        "target": (target_params, target_statistics),
        "optimizer": OPTIMIZER.init(params),
        "step": jnp.zeros((), jnp.int32),
    }

    def step(state: Any, batch: Any, keys: jax.Array) -> Any:
        params, statistics = state["online"]
        target_params, target_statistics = state["target"]
        _, key = jax.random.split(keys[0])

        def loss_of(params: Any) -> Any:
            online = nnx.merge(graph, params, statistics, copy=True)
            target = nnx.merge(graph, target_params, target_statistics, copy=True)
            loss = loss_fn(online, target, batch, key)
            of_online = nnx.state(online, nnx.BatchStat)
            return loss, (of_online, nnx.state(target, nnx.BatchStat))

        (loss, new), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        loss, grads = jax.lax.pmean((loss, grads), "batch")
        updates, optimizer = OPTIMIZER.update(grads, state["optimizer"], params)
        params = optax.apply_updates(params, updates)
        after = {
            "online": (params, new[0]),
            "target": (follow(target_params, params, state["step"]), new[1]),
            "optimizer": optimizer,
            "step": state["step"] + 1,
        }
        return after, loss

    compiled = on_replicas(step, num_replicas)
    key, losses = jax.random.key(2), []
    for batch in batches_of(TRAIN):
        state, loss = compiled(state, batch, keys_of_replicas(key, num_replicas))
        key, _ = jax.random.split(key)
        losses.append(float(loss))
    return Result(losses, {})


class Trainer(armillary.StandardTrainer):
    """The two networks, and the key of the views."""

    def __init__(self, strategy: armillary.distribute.Strategy) -> None:
        super().__init__(source_of(TRAIN))
        self.strategy = strategy
        self.online, self.target = Network(nnx.Rngs(0)), Network(nnx.Rngs(1))
        self.optimizer = nnx.Optimizer(self.online, OPTIMIZER, wrt=nnx.Param)
        self.key = jax.random.key(2)
        self.loss = nnx.metrics.Average("loss")
        self.global_step = self.optimizer.step

    def train_loop_begin(self) -> None:
        self.loss.reset()

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            self.key, key = jax.random.split(self.key)
            step = self.optimizer.step[...]
            loss, grads = nnx.value_and_grad(loss_fn)(
                self.online, self.target, batch, key
            )
            grads = armillary.all_reduce("mean", grads)
            self.optimizer.update(self.online, grads)
            target, online = (
                nnx.state(model, nnx.Param) for model in (self.target, self.online)
            )
            nnx.update(self.target, follow(target, online, step))
            self.loss.update(loss=loss)

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self) -> armillary.typing.Output:
        return {"loss": self.loss.compute()}


PORT = Port(run_original, Trainer, axis_name="batch")
