"""The parts that every port has: the loop as it was, and the same steps in Armillary.

Each module here holds one public training program twice. The original is a loop by
hand, in the manner of the program that it stands for: `jax.jit` on one device, and
`jax.shard_map` in place of `jax.pmap` on several. The port has the same model, loss and
optimizer under a strategy. The models are small, and the data come from a seed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

import armillary

NUM_STEPS = 4
BATCH_SIZE = 8
# A replica other than the first folds this number and its own into keys of the state.
OTHER_REPLICAS = 0xA5B111A2

Arrays = dict[str, np.ndarray]


class Result(NamedTuple):
    """The numbers of one run.

    Attributes:
        losses: The loss of each step.
        evaluation: The metrics after the last step, by name.
    """

    losses: list[float]
    evaluation: Mapping[str, float]


@dataclass(frozen=True)
class Port:
    """A training program, and its port.

    Attributes:
        run_original: Runs the loop by hand as it is divided over a number of replicas.
        make_trainer: Makes the port for a strategy. Its loops return a `"loss"`.
        make_evaluator: Makes the evaluator of such a trainer, if there is one.
        make_checkpoint: Makes the checkpoint of such a trainer.
        num_steps: The number of steps.
        axis_name: The axis of replicas, as the program names it.
        mesh_shape: The mesh of the sharded setup.
        rules: The rules of the sharded setup.
        tolerance: The largest relative difference.
        exact: The setups whose losses are equal bit for bit.
    """

    run_original: Callable[[int], Result]
    make_trainer: Callable[[armillary.distribute.Strategy], Any]
    make_evaluator: Callable[[Any], Any] | None = None
    make_checkpoint: Callable[[Any], armillary.Checkpoint] = lambda trainer: (
        armillary.Checkpoint(trainer=trainer)
    )
    num_steps: int = NUM_STEPS
    axis_name: str = "replica"
    mesh_shape: Mapping[str, int] | None = None
    rules: Mapping[str, PartitionSpec] | None = None
    tolerance: float = 1e-5
    exact: tuple[str, ...] = ()


def batches_of(arrays: Arrays, num_steps: int = NUM_STEPS) -> Iterator[Arrays]:
    """Yields the batches of the first steps."""
    for start in range(0, num_steps * BATCH_SIZE, BATCH_SIZE):
        yield {name: each[start : start + BATCH_SIZE] for name, each in arrays.items()}


def source_of(arrays: Any) -> Any:
    """Returns the same batches for a trainer."""
    return armillary.data.from_arrays(arrays, batch_size=BATCH_SIZE, repeat=True)


def make_images(num_examples: int, size: int = 8, channels: int = 1) -> Arrays:
    """Returns images of three classes, which differ in their brightness."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 3, num_examples).astype(np.int32)
    noise = rng.normal(size=(num_examples, size, size, channels))
    image = noise + (label[:, None, None, None] - 1)
    return {"image": image.astype(np.float32), "label": label}


def on_replicas(
    step: Callable[..., Any], num_replicas: int, axis_name: str = "batch"
) -> Callable[..., Any]:
    """Returns a step on several devices, as programs did it with `jax.pmap`.

    Args:
        step: Takes the state and the replica's parts of the other arguments. Returns
            arrays that are equal on all replicas.
        num_replicas: The number of devices.
        axis_name: The axis that the step reduces over.

    Returns:
        The compiled step. The first axis of its other arguments is divided.
    """
    kinds = (AxisType.Auto,)
    mesh = Mesh(np.array(jax.devices()[:num_replicas]), (axis_name,), axis_types=kinds)
    whole, divided = PartitionSpec(), PartitionSpec(axis_name)

    def run(state: Any, *parts: Any) -> Any:
        in_specs = (whole, *[divided] * len(parts))
        return jax.shard_map(
            step, mesh=mesh, in_specs=in_specs, out_specs=whole, check_vma=False
        )(state, *parts)

    return jax.jit(run)


def keys_of_replicas(key: jax.Array, num_replicas: int) -> jax.Array:
    """Returns the keys that replicas draw from, for one typed key of the state."""
    other = jax.random.fold_in(key, OTHER_REPLICAS)
    keys = [jax.random.fold_in(other, replica) for replica in range(num_replicas)]
    return jax.numpy.stack([key, *keys[1:]])
