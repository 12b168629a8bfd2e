"""The programs of several processes that train on filtered, packed, mixed text."""

import threading
from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np

import armillary
from armillary.data import InputOptions
from tests.multiprocess.rows import own_values, train_from_newest
from tests.multiprocess.scenarios import run_scenario

BATCH_SIZE = 16
ROW_LENGTH = 24
NUM_STEPS = 12
WEIGHTS = {0: {"words": 3, "numbers": 1}, 5: {"words": 1, "numbers": 1}}


class Texts:
    """Documents of bytes that count their reads; each has a language."""

    def __init__(self, name: str, count: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        sizes = random.integers(1, 60, count)
        self.documents = [
            f"{name} {number} {'x' * size}." for number, size in enumerate(sizes)
        ]
        self.languages = ["en" if number % 3 else "de" for number in range(count)]
        self.lengths = np.array([len(text) for text in self.documents])
        self.reads: Counter[int] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, number: int) -> np.ndarray:
        with self._lock:
            self.reads[number] += 1
        return np.frombuffer(self.documents[number].encode(), np.uint8)


def make_texts() -> dict[str, Texts]:
    return {"words": Texts("word", 90, seed=0), "numbers": Texts("number", 40, seed=1)}


def make_source(texts: dict[str, Texts]) -> armillary.data.MixedDataset:
    """Returns the mixture of the packed English documents of all texts."""
    packed: dict[str, Any] = {}
    for name, documents in texts.items():
        english = armillary.data.select(
            documents,
            lambda language: language == "en",
            metadata=documents.languages,
        )
        packed[name] = armillary.data.pack(
            english,
            row_length=ROW_LENGTH,
            lengths=documents.lengths[english.numbers],
            targets=True,
        )
    return armillary.data.mix(
        packed, WEIGHTS, batch_size=BATCH_SIZE, shuffle_seed=7, num_threads=2
    )


def reads(num_batches: int) -> dict[str, Any]:
    """Reads batches, and compares the own documents with the documents read."""
    strategy = armillary.ShardedStrategy()
    texts = make_texts()
    source = make_source(texts)
    dataset = strategy.distribute_dataset(source, InputOptions(prefetch=0))
    dataset.get_state()
    for documents in texts.values():
        documents.reads.clear()
    used: list[Any] = []
    iterator = iter(dataset)
    rows = 0
    for _ in range(num_batches):
        batch = next(iterator)
        own = own_values(batch["tokens"])
        rows += len(own)
        used.append(np.asarray(strategy.gather(batch["tokens"], axis=0)).tolist())
    return {
        "batches": used,
        "rows": rows,
        "reads": sum(sum(each.reads.values()) for each in texts.values()),
        "position": dataset.get_state()["source"],
    }


class Trainer(armillary.StandardTrainer):
    """Keeps a sum of the tokens of each row and step."""

    def __init__(self, strategy: Any, texts: dict[str, Texts]) -> None:
        super().__init__(strategy.distribute_dataset(make_source(texts)))
        self.strategy = strategy
        self.step = armillary.create_global_step()
        with strategy.scope():
            self.seen = jnp.zeros((NUM_STEPS, BATCH_SIZE), jnp.int32)
            self.total = jnp.zeros(256, jnp.int32)

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            tokens = batch["tokens"].astype(jnp.int32)
            places = (1 + batch["positions"]) * batch["segment_ids"]
            marks = jnp.sum(tokens * places, axis=1)
            marks += jnp.sum(batch["targets"].astype(jnp.int32), axis=1)
            self.seen = self.seen.at[self.step[...]].set(marks)
            # Whole numbers, whose sum does not depend on their order.
            self.total = self.total.at[tokens].add(1)
            self.step[...] += 1

        self.strategy.run(step_fn, (next(iterator),))


def trains(run_dir: str, steps: int) -> dict[str, Any]:
    """Trains up to a step from the newest checkpoint, and saves."""
    trainer = Trainer(armillary.ShardedStrategy(), make_texts())
    return train_from_newest(trainer, run_dir, steps)


if __name__ == "__main__":
    run_scenario(globals())
