"""The programs of several processes that read examples by number, and count them."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import armillary
from armillary.data import InputOptions, from_arrays, from_random_access
from armillary.errors import ArmillaryError
from tests.multiprocess.scenarios import run_scenario

NUM_EXAMPLES = 45
BATCH_SIZE = 16
NUM_STEPS = 12
BAD = 31
"""An example of the second batch, which the comparison of data does not read."""

OPTIONS: dict[str, dict[str, Any]] = {
    "full batches": {"repeat": True},
    "drop": {"remainder": "drop"},
    "pad": {"remainder": "pad"},
    "exact": {"remainder": "exact"},
}
"""Options of a source, and the rule for its last batch."""

STRATEGIES: dict[str, Callable[[], Any]] = {
    "sharded": armillary.ShardedStrategy,
    "two axes": lambda: armillary.ShardedStrategy({"data": 4, "tensor": 2}),
    "tensor": lambda: armillary.ShardedStrategy({"fsdp": 2, "tensor": 4}),
    "mirrored": armillary.MultiWorkerMirroredStrategy,
}


def make_arrays() -> dict[str, np.ndarray]:
    numbers = np.arange(NUM_EXAMPLES)
    return {
        "number": numbers.astype(np.int32),
        "x": (numbers[:, np.newaxis] * [1, 3, 5]).astype(np.float32),
    }


class Rows:
    """Examples that count their reads; the number `bad` cannot be read."""

    def __init__(self, bad: int | None = None) -> None:
        self._arrays = make_arrays()
        self._lock = threading.Lock()
        self._bad = bad
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def __getitem__(self, number: int) -> Any:
        if number == self._bad:
            raise OSError(f"example {number} is gone")
        with self._lock:
            self.reads[number] += 1
        return {name: array[number] for name, array in self._arrays.items()}


def make_source(rows: Rows | None, **options: Any) -> Any:
    """Returns a source of rows, or of the same arrays in memory."""
    settings = {"batch_size": BATCH_SIZE, "shuffle_seed": 3, **options}
    if rows is None:
        return from_arrays(make_arrays(), **settings)
    return from_random_access(rows, num_threads=2, **settings)


def distribute(strategy: Any, rows: Rows | None, options: dict[str, Any]) -> Any:
    settings = dict(options)
    remainder = settings.pop("remainder", None)
    source = make_source(rows, **settings)
    # Without reading ahead, because the test counts the reads for some batches.
    input_options = InputOptions(remainder=remainder, prefetch=0)
    return strategy.distribute_dataset(source, input_options)


def own_values(array: Any) -> list[np.ndarray]:
    """Returns the different rows of a batch on the devices of this process."""
    shards = getattr(array, "stacked", array).addressable_shards
    parts = {str(shard.index): np.asarray(shard.data) for shard in shards}
    return [row for part in parts.values() for row in part]


def own_numbers(batch: Any) -> set[int]:
    """Returns the numbers of the examples on the devices of this process."""
    return {
        number
        for part in own_values(batch["number"])
        for number in part.ravel().tolist()
    }


def read_batches(strategy: Any, dataset: Any) -> Iterator[tuple[set[int], Any]]:
    """Yields the own numbers, and all values with the position, of each batch."""
    iterator = iter(dataset)
    for _ in range(5):
        batch = next(iterator, None)
        if batch is None:
            return
        values = {
            name: np.asarray(strategy.gather(leaf, axis=0)).tolist()
            for name, leaf in batch.items()
        }
        yield own_numbers(batch), [values, dataset.get_state()["source"]]
    iterator.close()


def make_grain(rows: Rows, batch_size: int = BATCH_SIZE) -> grain.MapDataset:
    """Returns shuffled, repeated and mapped rows, as a dataset of Grain."""
    return (
        grain.MapDataset.source(rows)
        .seed(4)
        .shuffle()
        .map(lambda row: {**row, "x": 2 * row["x"]})
        .repeat()
        .batch(batch_size)
    )


def reads_grain(state: Any) -> dict[str, Any]:
    """Reads batches of Grain from a position, and compares with Grain alone."""
    alone = make_grain(Rows())
    found: dict[str, Any] = {}
    for name, make_strategy in STRATEGIES.items():
        strategy = make_strategy()
        rows = Rows()
        options = InputOptions(prefetch=0)
        dataset = strategy.distribute_dataset(make_grain(rows), options)
        dataset.set_state(state)
        rows.reads.clear()
        batches = list(read_batches(strategy, dataset))
        start = state["source"]["next_index"]
        own: Counter[int] = Counter()
        for numbers, _ in batches:
            own.update(numbers)
        found[name] = {
            "is_equal": [values for _, (values, _) in batches]
            == [
                {key: leaf.tolist() for key, leaf in alone[start + index].items()}
                for index in range(5)
            ],
            "own": sorted(own.elements()),
            "reads": sorted(rows.reads.elements()),
            "state": dataset.get_state(),
        }
    # Each process shuffles in its own way.
    other = grain.MapDataset.range(45).shuffle(seed=jax.process_index()).batch(8)
    try:
        armillary.ShardedStrategy().distribute_dataset(other)
    except ArmillaryError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def reads() -> dict[str, Any]:
    """Reads batches under all strategies; returns where rows differ from arrays."""
    found: dict[str, Any] = {}
    for name, make_strategy in STRATEGIES.items():
        strategy = make_strategy()
        for option, settings in OPTIONS.items():
            rows = Rows()
            dataset = distribute(strategy, rows, {**settings})
            dataset.get_state()
            rows.reads.clear()
            batches = list(read_batches(strategy, dataset))
            expected = list(
                read_batches(strategy, distribute(strategy, None, {**settings}))
            )
            own: Counter[int] = Counter()
            for numbers, _ in batches:
                own.update(numbers)
            found[f"{name}, {option}"] = {
                "is_equal": [each[1] for each in batches]
                == [each[1] for each in expected],
                "own": sorted(own.elements()),
                "reads": sorted(rows.reads.elements()),
                "batches": len(batches),
            }
    return found


class Trainer(armillary.StandardTrainer):
    """Keeps the numbers and a sum of the examples of each step."""

    def __init__(self, strategy: Any, rows: Rows | None, **options: Any) -> None:
        source = make_source(rows, **options)
        super().__init__(strategy.distribute_dataset(source))
        self.strategy = strategy
        self.step = armillary.create_global_step()
        with strategy.scope():
            self.seen = jnp.zeros((NUM_STEPS, BATCH_SIZE), jnp.int32)
            self.total = jnp.zeros(3)

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            self.seen = self.seen.at[self.step[...]].set(batch["number"])
            # Whole numbers, whose sum does not depend on their order.
            self.total = self.total + jnp.sum(batch["x"], axis=0)
            self.step[...] += 1

        self.strategy.run(step_fn, (next(iterator),))


def train(run_dir: str, steps: int, *, rows: Rows | None = None) -> dict[str, Any]:
    """Trains up to a step from the newest checkpoint, and saves."""
    trainer = Trainer(armillary.ShardedStrategy(), rows, repeat=True)
    if rows is not None:
        # The comparison between processes reads a few examples.
        trainer.train_dataset.get_state()
        rows.reads.clear()
    return train_from_newest(trainer, run_dir, steps)


def train_from_newest(trainer: Any, run_dir: str, steps: int) -> dict[str, Any]:
    """Restores the newest checkpoint, trains up to a step, and saves."""
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.step,
        strategy=trainer.strategy,
        steps_per_loop=2,
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer), run_dir
        ),
    )
    start = int(trainer.step[...])
    controller.train(steps)
    return {
        "start": start,
        "seen": whole(trainer.seen)[:steps].tolist(),
        "total": whole(trainer.total).tolist(),
        "position": trainer.train_dataset.get_state()["source"],
    }


def whole(array: jax.Array) -> np.ndarray:
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def trains(run_dir: str, steps: int) -> dict[str, Any]:
    rows = Rows()
    found = train(run_dir, steps, rows=rows)
    return {**found, "reads": sorted(rows.reads.elements())}


def fails() -> str:
    """Trains up to an example that only one process reads, and cannot."""
    # In one pass, so that no other process needs the example later.
    trainer = Trainer(armillary.ShardedStrategy(), Rows(bad=BAD), drop_remainder=True)
    try:
        trainer.train(NUM_STEPS)
    except (OSError, ArmillaryError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    run_scenario(globals())
