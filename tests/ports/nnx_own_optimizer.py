"""An NNX model with an optimizer class of its own, divided over a mesh.

The optimizer holds the variables of the model a second time, and writes to them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import armillary
from tests.ports.port import (
    BATCH_SIZE,
    NUM_STEPS,
    Arrays,
    Port,
    Result,
    batches_of,
    source_of,
)

X = np.random.default_rng(0).uniform(-1, 1, (NUM_STEPS * BATCH_SIZE, 1))
DATA = {"x": X.astype("float32"), "y": (0.8 * X**2 - 0.1).astype("float32")}


class MLP(nnx.Module):
    """Two layers, whose hidden units may be divided."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (1, 32)))
        self.bias = nnx.Param(jnp.zeros(32))
        self.down = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (32, 1)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(x @ self.up[...] + self.bias[...]) @ self.down[...]


class Velocity(nnx.Variable):
    """The running mean of a gradient."""


class Momentum(nnx.Module):
    """Gradient descent along a running mean of the gradients."""

    def __init__(self, params: nnx.State, rate: float, decay: float) -> None:
        self.params = nnx.data(params)
        velocity = jax.tree.map(
            lambda param: Velocity(jnp.zeros_like(param[...])),
            params,
            is_leaf=lambda node: isinstance(node, nnx.Variable),
        )
        self.velocity = nnx.data(velocity)
        self.rate, self.decay = rate, decay

    def update(self, grads: nnx.State) -> None:
        variables = [
            nnx.to_flat_state(each) for each in (self.params, self.velocity, grads)
        ]
        for (_, param), (_, velocity), (_, grad) in zip(*variables, strict=True):
            mean = self.decay * velocity[...] + (1 - self.decay) * grad[...]
            velocity[...] = mean
            param[...] -= self.rate * mean


def loss_fn(model: MLP, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def make() -> tuple[MLP, Momentum]:
    model = MLP(nnx.Rngs(0))
    return model, Momentum(nnx.state(model, nnx.Param), rate=0.5, decay=0.9)


def run_original(num_replicas: int) -> Result:
    # The batch is divided over all devices, and the compiler adds the reductions.
    kinds = (AxisType.Auto,)
    mesh = Mesh(np.array(jax.devices()[:num_replicas]), ("data",), axis_types=kinds)
    model, optimizer = make()

    @nnx.jit
    def train_step(model: MLP, optimizer: Momentum, batch: Arrays) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(grads)
        return loss

    losses = []
    for batch in batches_of(DATA):
        divided = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
        losses.append(float(train_step(model, optimizer, divided)))
    return Result(losses, {})


class Trainer(armillary.StandardTrainer):
    """The same loop under a strategy."""

    def __init__(self, strategy: armillary.distribute.Strategy) -> None:
        super().__init__(source_of(DATA))
        self.strategy = strategy
        self.model, self.optimizer = make()
        self.loss = nnx.metrics.Average("loss")
        self.global_step = armillary.create_global_step()

    def train_loop_begin(self) -> None:
        self.loss.reset()

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            loss, grads = nnx.value_and_grad(loss_fn)(self.model, batch)
            self.optimizer.update(armillary.all_reduce("mean", grads))
            self.loss.update(loss=loss)

        self.strategy.run(step_fn, args=(next(iterator),))
        self.global_step[...] += 1

    def train_loop_end(self) -> armillary.typing.Output:
        return {"loss": self.loss.compute()}


PORT = Port(
    run_original,
    Trainer,
    mesh_shape={"data": 2, "tensor": 2},
    rules={"/up$": PartitionSpec(None, "tensor"), "/down$": PartitionSpec("tensor")},
    exact=("one device",),
)
