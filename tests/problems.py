"""Small models, data and trainers that several test modules train."""

import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils

import armillary
from armillary.data import from_arrays
from armillary.state._lift import find_slots


class Holder:
    """Holds what it is given in attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class CNN(nnx.Module):
    """A convolutional classifier of 8 x 8 images, without batch norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.dense = nnx.Linear(64, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.avg_pool(nnx.relu(self.conv(x)), (2, 2), (2, 2))
        return self.dense(x.reshape(x.shape[0], -1))


class MLP(nnx.Module):
    """A classifier with every kind of state: weights, statistics, random keys."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(64, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.dropout(nnx.relu(self.norm(self.first(x.reshape(x.shape[0], -1)))))
        return self.last(x)


def make_digits(num_examples: int) -> dict[str, np.ndarray]:
    """Returns images of three classes, with noise."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 3, num_examples).astype(np.int32)
    noise = rng.normal(size=(num_examples, 8, 8, 1))
    image = noise + (label[:, None, None, None] - 1)
    return {"image": image.astype(np.float32), "label": label}


def make_batches(num_batches: int, start: int = 1) -> list[dict[str, np.ndarray]]:
    """Returns batches of two ones, twos, threes, ..."""
    return [{"x": np.full(2, start + i, np.float32)} for i in range(num_batches)]


class Classifier(armillary.StandardTrainer):
    """Trains a model, and keeps the loss of each of the first 64 steps."""

    def __init__(
        self,
        strategy: armillary.distribute.Strategy,
        model: nnx.Module,
        transform: optax.GradientTransformation,
        dataset: Any = None,
        **options: Any,
    ) -> None:
        if dataset is None:
            dataset = make_training_data(strategy)
        super().__init__(dataset, armillary.StandardTrainerOptions(**options))
        self.strategy, self.model = strategy, model
        self.optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)
        self.accuracy = nnx.metrics.Accuracy()
        self.losses = jnp.zeros(64)

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> jax.Array:
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
            return loss

        step = self.optimizer.step[...]
        loss = self.strategy.run(step_fn, args=(next(iterator),))
        total = self.strategy.reduce("sum", loss)
        self.losses = self.losses.at[step].set(total)

    def train_loop_end(self) -> armillary.typing.Output:
        return {"accuracy": self.accuracy.compute()}


class Metrics(armillary.StandardEvaluator):
    """Two metrics over a dataset, with nothing learned."""

    def __init__(
        self, strategy: armillary.distribute.Strategy, dataset: Any, **options: Any
    ) -> None:
        super().__init__(dataset, armillary.StandardEvaluatorOptions(**options))
        self.strategy = strategy
        self.average = nnx.metrics.Average("value")
        self.accuracy = nnx.metrics.Accuracy()

    def eval_begin(self) -> Any:
        self.average.reset()
        self.accuracy.reset()

    def eval_step(self, iterator: Any) -> Any:
        return self.strategy.run(self.add, args=(next(iterator),))

    def add(self, batch: Any) -> Any:
        """Adds the examples of one replica."""
        self.average.update(value=batch["value"])
        self.accuracy.update(logits=batch["logits"], labels=batch["label"])

    def eval_end(self, *state: Any) -> dict[str, Any]:
        return {"average": self.average.compute(), "accuracy": self.accuracy.compute()}

    @property
    def counts(self) -> tuple[int, int]:
        """The number of examples that each metric has seen."""
        return int(self.average.count[...]), int(self.accuracy.count[...])


class Positioned:
    """An iterator as users write it, whose state is one live dictionary."""

    batches: Any = ()

    def __init__(self) -> None:
        self.state = {"index": 0}

    def __iter__(self) -> "Positioned":
        return self

    def __next__(self) -> np.ndarray:
        if self.state["index"] == len(self.batches):
            raise StopIteration
        self.state["index"] += 1
        return np.array(self.batches[self.state["index"] - 1])

    def get_state(self) -> dict[str, int]:
        return self.state

    def set_state(self, state: dict[str, int]) -> None:
        self.state = state


def make_training_data(
    strategy: armillary.distribute.Strategy, batch_size: int = 16
) -> armillary.data.DistributedDataset:
    """Returns an endless shuffled dataset, whose epochs end inside batches."""
    source = from_arrays(
        make_digits(72), batch_size=batch_size, shuffle_seed=3, repeat=True
    )
    return armillary.distribute.make_distributed_dataset(strategy, source)


def make_strategy(num_replicas: int) -> armillary.MirroredStrategy:
    """Returns a strategy on the first devices."""
    return armillary.MirroredStrategy(jax.devices()[:num_replicas])


def read_leaves(root: Any) -> dict[str, Any]:
    """Returns every array that `root` reaches, by path."""
    leaves: dict[str, Any] = {}
    for slot in find_slots(root):
        leaves.update(zip(slot.paths, slot.read(), strict=True))
    return leaves


def read_state(root: Any) -> dict[str, np.ndarray]:
    """Returns a copy of every array that `root` reaches, by path."""
    return {path: to_numpy(leaf) for path, leaf in read_leaves(root).items()}


def copy_state(source: Any, target: Any) -> None:
    """Puts copies of all arrays of an object into an object of the same kind."""
    for own, other in zip(find_slots(target), find_slots(source), strict=True):
        own.write([jnp.copy(leaf) for leaf in other.read()])


def to_numpy(leaf: Any) -> np.ndarray:
    """Returns a copy of an array, or of the data of random keys.

    If processes share the array, all of them must call it.
    """
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.array(leaf)


class Snapshot:
    """The state of a trainer and its data, to go back to."""

    def __init__(self, trainer: Classifier) -> None:
        self._trainer = trainer
        self._leaves = [
            (slot, [jnp.copy(leaf) for leaf in slot.read()])
            for slot in find_slots(trainer)
        ]
        self._position = trainer.train_dataset.get_state()

    def restore(self) -> None:
        """Puts copies of what was there back."""
        for slot, leaves in self._leaves:
            slot.write([jnp.copy(leaf) for leaf in leaves])
        self._trainer.train_dataset.set_state(self._position)


def find_changed(
    before: dict[str, np.ndarray], after: dict[str, np.ndarray]
) -> set[str]:
    """Returns the paths of arrays that differ in their type or any bit."""
    assert before.keys() == after.keys()
    return {
        path
        for path, value in before.items()
        if value.dtype != after[path].dtype or value.tobytes() != after[path].tobytes()
    }


def assert_identical(
    actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> None:
    """Asserts that two states are equal bit for bit."""
    different = find_changed(expected, actual)
    assert not different, f"Different: {', '.join(sorted(different))}"


class Notes(queue.SimpleQueue):
    """A list that no search looks into, so that a step may add to it while traced."""

    append = queue.SimpleQueue.put
    __len__ = queue.SimpleQueue.qsize

    def __iter__(self) -> Iterator[Any]:
        held = [self.get() for _ in range(len(self))]
        for note in held:
            self.put(note)
        return iter(held)


def train_with_stops(
    make_trainer: Callable[[], armillary.StepTrainer],
    directory: Path,
    stops: Sequence[int],
) -> armillary.StepTrainer:
    """Trains a pure step up to each stop, in a new trainer; returns the last one."""
    assert stops
    for stop in stops:
        trainer = make_trainer()
        manager = armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer), directory
        )
        controller = armillary.Controller(
            trainer=trainer,
            global_step=trainer.global_step,
            steps_per_loop=4,
            checkpoint_manager=manager,
        )
        controller.train(stop)
    return trainer  # pyright: ignore[reportPossiblyUnboundVariable]
