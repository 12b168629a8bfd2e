"""The program of several processes on meshes of a user, with a model made in parts."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import armillary
from armillary.checkpoint import _arrays
from tests.multiprocess.scenarios import run_scenario

SIZE = 64
ROWS = np.random.default_rng(0).normal(size=(32, SIZE)).astype(np.float32)
NUM_LAYERS = 24


class Stack(nnx.Module):
    """Layers in a loop, which are computed again in the backward pass."""

    def __init__(self, size: int, names: Any = None) -> None:
        self.size = size
        key = jax.random.key(0)
        shape = (NUM_LAYERS, size, size)
        kernels = jax.random.normal(key, shape) / np.sqrt(size)
        with nnx.use_eager_sharding(False):
            self.kernels = nnx.Param(kernels, out_sharding=names)

    def __call__(self, x: jax.Array) -> jax.Array:
        def apply(x: jax.Array, kernel: jax.Array) -> Any:
            return x + jnp.tanh(x @ kernel), None

        return jax.lax.scan(jax.checkpoint(apply), x, self.kernels[...])[0]


def make_state(size: int, names: Any = None) -> Any:
    model = Stack(size, names)
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def make_train_step(strategy: Any, model: Any, optimizer: Any) -> Callable[[], float]:
    """Returns a function that takes a step, and returns its loss."""
    size = model.size

    @armillary.function
    def train_step(batch: Any) -> Any:
        def step_fn(batch: Any) -> Any:
            def loss_fn(model: Any) -> Any:
                x = jnp.tile(batch, size // SIZE)
                return jnp.mean((model(x) - 1) ** 2)

            loss, gradients = nnx.value_and_grad(loss_fn)(model)
            optimizer.update(model, armillary.all_reduce("mean", gradients))
            return loss

        return strategy.run(step_fn, args=(batch,))

    source = armillary.data.from_arrays(ROWS, batch_size=16, repeat=True)
    batches = iter(strategy.distribute_dataset(source))
    return lambda: float(train_step(next(batches)))


def train(strategy: Any, model: Any, optimizer: Any, num_steps: int) -> list[float]:
    """Returns the loss of each step."""
    train_step = make_train_step(strategy, model, optimizer)
    return [train_step() for _ in range(num_steps)]


def follow(strategy: Any, names: Any) -> dict[str, Any]:
    """Makes a model in parts, and trains it."""
    model, optimizer = strategy.make(make_state, SIZE, names)
    losses = train(strategy, model, optimizer, 3)
    kernels = model.kernels[...]
    whole = strategy.gather(kernels, axis=0)
    return {
        "losses": losses,
        "spec": list(getattr(kernels.sharding, "spec", [])),
        "sum": float(np.abs(np.asarray(whole)).sum()),
    }


def meshes() -> dict[str, Any]:
    """Trains on a mesh of JAX, and on groups of devices with slow links."""
    count = jax.process_count

    def make_mesh() -> Any:
        kinds = (jax.sharding.AxisType.Explicit,) * 2
        return jax.make_mesh((count(), 2), ("data", "model"), axis_types=kinds)

    own = armillary.ShardedStrategy(make_mesh)
    found = {"own": follow(own, (None, None, "model"))}

    slow = armillary.ShardedStrategy(
        {"fsdp": 2, "data": count()}, dcn={"data": count()}
    )
    devices = slow.mesh.devices[..., 0]  # Along `data` and `fsdp`.
    found["slow"] = follow(slow, (None, "fsdp", None))
    found["processes"] = [[d.process_index for d in row] for row in devices]
    return found


def limited(size: int, share: float, run_dir: str) -> dict[str, Any]:
    """Trains a model that does not fit into memory: from its start, or from a save."""
    strategy = armillary.ShardedStrategy()
    small = strategy.make(make_state, SIZE)
    train(strategy, *small, 1)
    # Threads and buffers of JAX and Orbax exist afterwards.
    warm_up = armillary.Checkpoint(model=small[0])
    warm_up.read(warm_up.save(Path(run_dir) / "small"))

    num_bytes = 3 * 4 * NUM_LAYERS * size**2
    lines = Path("/proc/self/status").read_text().splitlines()
    (used,) = [int(line.split()[1]) for line in lines if line.startswith("VmData")]

    def limit_memory(share: float) -> None:
        limit = 1024 * used + int(share * num_bytes)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))

    limit_memory(share)
    model, optimizer = strategy.make(make_state, size)
    # Small arrays, as this state is small.
    _arrays._GROUP_BYTES = num_bytes // 64
    checkpoint = armillary.Checkpoint(model=model, optimizer=optimizer)
    manager = armillary.CheckpointManager(checkpoint, run_dir)
    restored = manager.restore_or_initialize()
    if restored is not None:
        # Threads of the reader stay, whose stacks are a tenth of this small state.
        limit_memory(share + 0.2)

    train_step = make_train_step(strategy, model, optimizer)
    part = model.kernels[...].addressable_shards[0].data
    # Two steps are a pass over the data, so the same batches come again.
    losses = [train_step(), train_step()]
    if restored is None:
        manager.save(2)
        manager.sync()
    later_losses = [train_step(), train_step()]
    return {"losses": losses, "later": later_losses, "part": list(part.shape)}


if __name__ == "__main__":
    run_scenario(globals())
