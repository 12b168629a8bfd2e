"""Takes the batches of one step out of a chunk, inside a program.

A compiler that merges this with the step's own arithmetic may round differently for
chunks of another size (one step is enough), and where rows come from arrays that stay
on the device. So the step is compiled apart from it, and gets the same bits from all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from armillary.typing import PyTree

Gather = Callable[[PyTree, PyTree], PyTree]
"""`armillary.data.feed._gather.Gather.on_device`."""


def take_batches(
    inputs: Sequence[tuple[PyTree, PyTree]],
    batches_per_step: Sequence[int],
    gathers: Sequence[Gather],
    index: Any,
) -> list[Any]:
    """Returns the leaves of the batches of one step of `Chunk.inputs`, in order."""

    def take(index: Any) -> list[Any]:
        return jax.tree.leaves(
            [
                [
                    gather(resident, _take_batch(arrays, index * count + offset))
                    for offset in range(count)
                ]
                for (arrays, resident), count, gather in zip(
                    inputs, batches_per_step, gathers, strict=True
                )
            ]
        )

    return jax.lax.platform_dependent(
        index,
        cpu=lambda index: _take_in_branch(take, index),
        default=lambda index: jax.lax.optimization_barrier(take(index)),
    )


def _take_in_branch(take: Callable[[Any], list[Any]], index: Any) -> list[Any]:
    # XLA's CPU compiler drops barriers before it merges operations, but it keeps a
    # branch whose condition it cannot know. The other one is never taken; being made
    # of the same operations, it leaves the arrays split over devices as they are.
    return jax.lax.cond(
        index >= 0, take, lambda index: take(jnp.zeros_like(index)), index
    )


def _take_batch(arrays: PyTree, index: Any) -> PyTree:
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), arrays
    )
