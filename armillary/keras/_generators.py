"""Copies of the batches of a user's generator, which may fill one buffer repeatedly."""

from collections.abc import Iterator
from typing import Any

import numpy as np


def copy_batches(batches: Iterator[Any]) -> Iterator[Any]:
    """Yields batches with arrays of their own.

    JAX may use the memory of a NumPy array in place, so a later write of the user may
    change the batch. Keras reads two batches of a generator before it uses the first.
    So the batches of a generator are copied when they are read. The result is a
    generator, too.
    """
    import keras

    for batch in batches:
        yield keras.tree.map_structure(_copy, batch)


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
