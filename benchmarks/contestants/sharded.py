"""A stack of layers that devices share (FSDP), as a hand-written step and by Armillary.

Both divide each stack along the larger axis of its layers, and collect one layer at a
time, in bfloat16. By hand, that takes a sharding for each array, and a constraint for
each use.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import armillary
from benchmarks.contestants.controller import capture_log

AXIS = "fsdp"
NUM_BATCHES = 4


@dataclass(frozen=True)
class Sizes:
    """The sizes of the stack and of a batch."""

    width: int = 256
    depth: int = 8
    batch_size: int = 256


SIZES = {"full": Sizes(), "small": Sizes(width=32, depth=4, batch_size=32)}


def make_optimizer() -> optax.GradientTransformation:
    """Returns the optimizer of both."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def make_state(sizes: Sizes) -> dict[str, Any]:
    """Returns the parameters, in stacks, and the state of the optimizer."""
    first, second = jax.random.split(jax.random.key(0))
    width = sizes.width
    init = jax.nn.initializers.lecun_normal(batch_axis=0)
    parameters = {
        "up": init(first, (sizes.depth, width, 4 * width)),
        "down": init(second, (sizes.depth, 4 * width, width)),
    }
    return {"parameters": parameters, "moments": make_optimizer().init(parameters)}


def compute_loss(
    parameters: Any, x: jax.Array, collect: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Returns the mean square error of a model that has to return its input."""

    def layer(x: jax.Array, own: Any) -> Any:
        hidden = jax.nn.gelu(x @ collect(own["up"].astype(jnp.bfloat16)))
        return x + hidden @ collect(own["down"].astype(jnp.bfloat16)), None

    found, _ = jax.lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), parameters)
    return jnp.mean((found.astype(jnp.float32) - x) ** 2)


def make_rows(sizes: Sizes) -> np.ndarray:
    """Returns the rows of some batches."""
    shape = (NUM_BATCHES * sizes.batch_size, sizes.width)
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def update(state: Any, gradients: Any) -> Any:
    """Returns the state after a step of the optimizer."""
    parameters = state["parameters"]
    updates, moments = make_optimizer().update(gradients, state["moments"], parameters)
    return {"parameters": optax.apply_updates(parameters, updates), "moments": moments}


def step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Runs one step under a strategy: the step of a single device."""

    def loss_fn(parameters: Any) -> jax.Array:
        return compute_loss(parameters, batch["x"], lambda kernel: kernel)

    loss, gradients = jax.value_and_grad(loss_fn)(state["parameters"])
    gradients = armillary.all_reduce("mean", gradients)
    return update(state, gradients), {"loss": loss}


def make_trainer(
    sizes: Sizes, strategy: armillary.ShardedStrategy
) -> armillary.StepTrainer:
    """Returns a trainer whose state is made in parts."""
    data = armillary.data.from_arrays(
        {"x": make_rows(sizes)}, batch_size=sizes.batch_size, repeat=True
    )
    state = strategy.make(make_state, sizes)
    return armillary.StepTrainer(step, state, data, strategy=strategy)


class HandWritten:
    """A step of `jax.jit` with a `NamedSharding` for each array.

    Attributes:
        state: The state, made in parts.
        batch_sharding: The sharding of a batch.
        program: The compiled step, from state and batch to state and loss.
    """

    def __init__(self, sizes: Sizes, mesh: Mesh) -> None:
        parts = {
            "up": NamedSharding(mesh, PartitionSpec(None, None, AXIS)),
            "down": NamedSharding(mesh, PartitionSpec(None, AXIS)),
        }
        whole = NamedSharding(mesh, PartitionSpec())
        self.batch_sharding = NamedSharding(mesh, PartitionSpec(AXIS))

        def choose(keys: Any, leaf: Any) -> NamedSharding:
            return parts[keys[-1].key] if leaf.ndim else whole

        types = jax.eval_shape(lambda: make_state(sizes))
        shardings = jax.tree_util.tree_map_with_path(choose, types)
        make = jax.jit(lambda: make_state(sizes), out_shardings=shardings)
        self.state = make()

        def collect(kernel: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(kernel, whole)

        def run(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            def loss_fn(parameters: Any) -> jax.Array:
                return compute_loss(parameters, x, collect)

            loss, gradients = jax.value_and_grad(loss_fn)(state["parameters"])
            gradients = jax.lax.with_sharding_constraint(gradients, parts)
            return update(state, gradients), loss

        self.program = jax.jit(
            run,
            in_shardings=(shardings, self.batch_sharding),
            out_shardings=(shardings, whole),
            donate_argnums=0,
        )


class ByHand:
    """The loop around the hand-written step."""

    def __init__(self, sizes: Sizes) -> None:
        devices = jax.devices()
        mesh = jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,))
        self._step = HandWritten(sizes, mesh)
        self._rows = make_rows(sizes)
        self._size = sizes.batch_size
        self._num_steps = 0

    def run(self, num_steps: int) -> float:
        """Runs steps to their end; returns the loss of the last step."""
        loss = None
        for _ in range(num_steps):
            start = self._num_steps % NUM_BATCHES * self._size
            rows = self._rows[start : start + self._size]
            batch = jax.device_put(rows, self._step.batch_sharding)
            # On the CPU, two programs with collectives may wait for each other.
            jax.block_until_ready(loss)
            self._step.state, loss = self._step.program(self._step.state, batch)
            self._num_steps += 1
        assert loss is not None
        jax.block_until_ready(self._step.state)
        return float(loss)


class UnderStrategy:
    """A `Controller` around a trainer under a `ShardedStrategy`."""

    def __init__(self, sizes: Sizes) -> None:
        self._log = capture_log()
        strategy = armillary.ShardedStrategy()
        self._trainer = make_trainer(sizes, strategy)
        self._controller = armillary.Controller(
            trainer=self._trainer,
            global_step=self._trainer.global_step,
            strategy=strategy,
            steps_per_loop=1,
        )
        self._num_steps = 0

    def run(self, num_steps: int) -> float:
        """Runs steps to their end; returns the loss of the last step."""
        self._log.lines.clear()
        self._num_steps += num_steps
        history = self._controller.train(self._num_steps)
        jax.block_until_ready(self._trainer.state)
        return float(history["loss"][-1])


CONTESTANTS = {"by-hand": ByHand, "armillary": UnderStrategy}
