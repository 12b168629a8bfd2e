"""Batches of a user's data for Keras, who may fill one buffer again and again."""

from collections.abc import Iterator
from typing import Any

import numpy as np


def copy_batches(batches: Iterator[Any]) -> Iterator[Any]:
    """Yields batches with arrays of their own.

    JAX may use the memory of a NumPy array as it is, also after the user has written to
    it. Keras reads two batches of a generator before it uses the first, so the batches
    of a generator are copied as they are read. The result is a generator, too.
    """
    import keras

    for batch in batches:
        yield keras.tree.map_structure(_copy, batch)


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
