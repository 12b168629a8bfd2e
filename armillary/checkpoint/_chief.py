"""Lets one process decide for all.

Whether a checkpoint is good must have one answer: processes that restored different
ones would train a mixture. It is also one reading of all files instead of one for each
process.
"""

import json
from collections.abc import Callable

import jax
import numpy as np

from armillary.errors import CheckpointError


def decide(function: Callable[[], str | None]) -> str | None:
    """Returns on every process what `function` returns on process 0.

    All processes must call it. An error of `function` is raised on all of them.

    Raises:
        CheckpointError: If `function` raised one.
    """
    if jax.process_count() == 1:
        return function()
    answer: list[str | None] = [None, None]
    if jax.process_index() == 0:
        try:
            answer[0] = function()
        except CheckpointError as error:
            answer[1] = str(error)
    result, problem = json.loads(_broadcast(json.dumps(answer)))
    if problem is not None:
        raise CheckpointError(problem)
    return result


def _broadcast(text: str) -> str:
    """Returns the text of process 0."""
    from jax.experimental import multihost_utils

    data = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(data.size)))
    # Every process must give an array of the same shape.
    padded = np.resize(data, size)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).decode()
