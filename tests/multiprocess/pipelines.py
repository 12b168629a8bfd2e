"""The programs of several processes that read data of their own under a mesh."""

from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import armillary
from armillary.data import InputContext, InputOptions, from_arrays, mix, pack
from armillary.errors import ArmillaryError
from tests.multiprocess.rows import whole
from tests.multiprocess.scenarios import run_scenario

NUM_EXAMPLES = 96
BATCH_SIZE = 16
NUM_STEPS = 6

MESHES: dict[str, dict[str, int]] = {
    "data": {"data": 8},
    "data and tensor": {"data": 4, "tensor": 2},
    "tensor over processes": {"data": 2, "tensor": 4},
    "only tensor": {"data": 1, "tensor": 8},
}
"""The sizes of a mesh of 8 devices."""


def make_examples(context: InputContext, count: int = NUM_EXAMPLES) -> np.ndarray:
    """Returns the numbers of the examples of an input pipeline."""
    return np.arange(count, dtype=np.int32)[
        context.input_pipeline_id :: context.num_input_pipelines
    ]


def make_arrays(context: InputContext) -> Any:
    size = context.get_per_replica_batch_size(BATCH_SIZE)
    return from_arrays({"x": make_examples(context)}, batch_size=size)


def make_stream(context: InputContext) -> Any:
    """Returns a stream of Grain, which has positions but no examples by number."""
    size = context.get_per_replica_batch_size(BATCH_SIZE)
    numbers = make_examples(context).tolist()
    rows = grain.MapDataset.source(numbers).to_iter_dataset()
    return rows.map(lambda number: {"x": np.int32(number)}).batch(size)


def make_generator(context: InputContext) -> Any:
    size = context.get_per_replica_batch_size(BATCH_SIZE)
    numbers = make_examples(context)

    def generate() -> Iterator[Any]:
        for start in range(0, len(numbers), size):
            yield {"x": numbers[start : start + size]}

    return generate


SOURCES: dict[str, Callable[[InputContext], Any]] = {
    "arrays": make_arrays,
    "stream": make_stream,
    "generator": make_generator,
}


class Trainer(armillary.StandardTrainer):
    """Keeps the examples of each step, and their sum."""

    def __init__(self, strategy: Any, dataset: Any) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.step = armillary.create_global_step()
        with strategy.scope():
            self.seen = jnp.zeros((NUM_STEPS, BATCH_SIZE), jnp.int32)

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            self.seen = self.seen.at[self.step[...]].set(batch["x"])
            self.step[...] += 1

        self.strategy.run(step_fn, (next(iterator),))


class Adder(armillary.StandardEvaluator):
    """Counts and adds up the examples that a mask does not hide."""

    def __init__(self, strategy: Any, dataset: Any) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.eval_begin()

    def eval_begin(self) -> None:
        self.count = jnp.zeros((), jnp.int32)
        self.total = jnp.zeros((), jnp.int32)

    def eval_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            mask = batch.get("mask", jnp.ones_like(batch["x"], bool))
            self.count = self.count + jnp.sum(mask)
            self.total = self.total + jnp.sum(jnp.where(mask, batch["x"], 0))

        self.strategy.run(step_fn, (next(iterator),))

    def eval_end(self, *state: Any) -> dict[str, Any]:
        del state
        return {"count": self.count, "sum": self.total}


def catch(call: Callable[[], Any]) -> str:
    """Returns the error of a call, or an empty text."""
    try:
        call()
    except (ArmillaryError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def reads() -> dict[str, Any]:
    """Reads one pass over each source under each mesh."""
    found: dict[str, Any] = {}
    for name, mesh in MESHES.items():
        strategy = armillary.ShardedStrategy(mesh)
        context = strategy.input_context
        found[name] = {
            "context": [
                context.num_input_pipelines,
                context.input_pipeline_id,
                context.num_replicas_in_sync,
            ]
        }
        for source, make in SOURCES.items():
            dataset = strategy.distribute_datasets_from_function(make)
            assert dataset.element_spec["x"].shape == (BATCH_SIZE,)
            found[name][source] = [
                np.asarray(strategy.gather(batch["x"], axis=0)).tolist()
                for batch in dataset
            ]
    return found


def trains(run_dir: str, steps: int, mesh: dict[str, int], source: str) -> Any:
    """Trains up to a step from the newest checkpoint, and saves."""
    strategy = armillary.ShardedStrategy(mesh)
    dataset = strategy.distribute_datasets_from_function(SOURCES[source])
    trainer = Trainer(strategy, dataset)
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer), run_dir
    )

    def train() -> None:
        armillary.Controller(
            trainer=trainer,
            global_step=trainer.step,
            strategy=strategy,
            steps_per_loop=2,
            checkpoint_manager=manager,
        ).train(steps)

    error = catch(train)
    return {"seen": whole(trainer.seen)[:steps].tolist(), "error": error}


def evaluates() -> dict[str, Any]:
    """Evaluates data that pipelines do not share equally."""
    strategy = armillary.ShardedStrategy({"data": 4, "tensor": 2})

    def make(context: InputContext) -> Any:
        # More for one pipeline than for the others.
        examples = make_examples(context, 50)
        if context.input_pipeline_id == 1:
            examples = np.concatenate([examples, np.arange(50, 60, dtype=np.int32)])
        return from_arrays({"x": examples}, batch_size=4)

    def evaluate(remainder: Any) -> list[int]:
        options = InputOptions(remainder=remainder)
        dataset = strategy.distribute_datasets_from_function(make, options)
        result = Adder(strategy, dataset).evaluate(-1)
        return [int(result["count"]), int(result["sum"])]

    return {
        "pad": evaluate("pad"),
        "drop": evaluate("drop"),
        "unequal": catch(lambda: evaluate(None)),
    }


def mistakes() -> dict[str, str]:
    """Makes datasets that cannot be right."""

    def make_different(context: InputContext) -> Any:
        del context
        return [{"x": np.full(8, jax.process_index(), np.int32)}]

    def read(mesh: Any, make: Callable[[InputContext], Any]) -> None:
        strategy = armillary.ShardedStrategy(mesh)
        list(strategy.distribute_datasets_from_function(make))

    def make_odd(context: InputContext) -> Any:
        return from_arrays({"x": make_examples(context)}, batch_size=3)

    def make_overlapping() -> Mesh:
        shifted = np.array(jax.devices())[[0, 7, 1, 2, 3, 4, 5, 6]]
        return Mesh(shifted.reshape(4, 2), ("data", "tensor"))

    tensor = MESHES["tensor over processes"]
    return {
        "different": catch(lambda: read(tensor, make_different)),
        "odd": catch(lambda: read({"data": 8}, make_odd)),
        "overlapping": catch(lambda: read(make_overlapping, make_arrays)),
    }


def fails(prefetch: int) -> dict[str, Any]:
    """Trains on generators, of which the one of process 1 fails."""
    strategy = armillary.ShardedStrategy({"data": 8})

    def make(context: InputContext) -> Any:
        size = context.get_per_replica_batch_size(BATCH_SIZE)

        def generate() -> Iterator[Any]:
            for number in range(40):
                if number == 3 and context.input_pipeline_id == 1:
                    raise OSError("the disk is gone")
                yield {"x": np.full(size, number, np.int32)}

        return generate

    options = InputOptions(prefetch=prefetch)
    dataset = strategy.distribute_datasets_from_function(make, options)
    trainer = Trainer(strategy, dataset)
    found = ""
    try:
        trainer.train(NUM_STEPS)
    except (ArmillaryError, OSError) as error:
        found = f"{type(error).__name__}: {error}"
    return {"error": found}


def mixes(mesh: dict[str, int]) -> dict[str, Any]:
    """Reads a mixture of packed rows in each pipeline, and again from its middle."""
    strategy = armillary.ShardedStrategy(mesh)

    def make(context: InputContext) -> Any:
        own = range(context.input_pipeline_id, 60, context.num_input_pipelines)
        documents = [np.full(2 + number % 7, number, np.int32) for number in own]
        packed = pack(documents, row_length=8, targets=True)
        return mix(
            {"a": packed, "b": packed},
            {0: [1, 1], 3: [1, 3]},
            batch_size=context.get_per_replica_batch_size(BATCH_SIZE),
            shuffle_seed=0,
        )

    def read(iterator: Any) -> list[Any]:
        tokens = [next(iterator)["tokens"] for _ in range(3)]
        return [np.asarray(strategy.gather(each, axis=0)).tolist() for each in tokens]

    dataset = strategy.distribute_datasets_from_function(make)
    iterator = iter(dataset)
    for _ in range(5):
        next(iterator)
    state = dataset.get_state()
    rest = read(iterator)
    again = strategy.distribute_datasets_from_function(make)
    again.set_state(state)
    return {
        "used": [position["source"]["used"] for position in state["pipelines"]],
        "rest": rest,
        "again": read(iter(again)),
    }


if __name__ == "__main__":
    run_scenario(globals())
