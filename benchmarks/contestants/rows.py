"""The hand-written input of the references: shuffled rows, gathered in blocks.

The order is the same as in `armillary.data.from_arrays` with the same seed, so all
contestants see the same batches.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.tasks import Batch, Task

SHUFFLE_SEED = 1
GATHER_STEPS = 16


class RowStream:
    """An endless stream of row numbers, shuffled again for each epoch."""

    def __init__(self, num_examples: int, seed: int) -> None:
        self._num_examples, self._seed = num_examples, seed
        self._epoch = 0
        self._rows = self._permutation()

    def take(self, count: int) -> np.ndarray:
        """Returns the next `count` rows."""
        parts = [self._rows[:count]]
        missing = count - len(parts[0])
        self._rows = self._rows[count:]
        while missing:
            self._epoch += 1
            rows = self._permutation()
            parts.append(rows[:missing])
            self._rows = rows[missing:]
            missing -= len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _permutation(self) -> np.ndarray:
        bits = np.random.PCG64([self._seed, self._epoch])
        order = np.random.Generator(bits).permutation(self._num_examples)
        return order.astype(np.int32)


def read_chunks(task: Task, data: str, steps: int) -> Iterator[Any]:
    """Yields chunks of `steps` batches: leaves of shape `(steps, batch, ...)`.

    Args:
        task: Whose examples to read.
        data: `"memory"` or `"grain"` for rows, `"resident"` for row numbers.
        steps: Batches in one chunk.
    """
    if data == "grain":
        batches = iter(make_grain_dataset(task))
        while True:
            read = [next(batches) for _ in range(steps)]
            yield {name: np.stack([batch[name] for batch in read]) for name in read[0]}
    stream = RowStream(task.num_examples, SHUFFLE_SEED)
    arrays = {} if data == "resident" else task.make_arrays()
    while True:
        rows = stream.take(steps * task.batch_size).reshape(steps, task.batch_size)
        if data == "resident":
            yield rows
        else:
            yield {name: np.take(array, rows, axis=0) for name, array in arrays.items()}


def read_batches(task: Task, data: str) -> Iterator[Any]:
    """Yields batches; rows of several are gathered at once."""
    if data == "grain":
        yield from make_grain_dataset(task)
    for chunk in read_chunks(task, data, GATHER_STEPS):
        for index in range(GATHER_STEPS):
            if data == "resident":
                yield chunk[index]
            else:
                yield {name: array[index] for name, array in chunk.items()}


def make_grain_dataset(task: Task) -> Any:
    """Returns the Grain pipeline that all contestants read."""
    import grain

    dataset = grain.MapDataset.source(_Examples(task.make_arrays()))
    return dataset.seed(SHUFFLE_SEED).shuffle().repeat().batch(task.batch_size)


class _Examples:
    """Rows of arrays, one at a time, as Grain reads a source."""

    def __init__(self, arrays: Batch) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays["label"])

    def __getitem__(self, index: Any) -> Batch:
        return {name: array[index] for name, array in self._arrays.items()}

    def __repr__(self) -> str:
        return f"_Examples({len(self)})"
