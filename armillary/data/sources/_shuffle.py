"""The order of the examples of one epoch, which depends only on a few numbers."""

from collections.abc import Sequence

import numpy as np


def make_order(count: int, seed: int | None, *numbers: int) -> Sequence[int]:
    """Returns the numbers of `count` examples in the order of an epoch.

    Args:
        count: The number of examples.
        seed: The seed of the order; `None` leaves the examples in their order.
        numbers: The epoch, and more numbers with an order of their own. NumPy leaves
            out zeros at the end, so `make_order(count, seed, epoch, 0)` is the order
            of `make_order(count, seed, epoch)`.
    """
    if seed is None:
        # Not an array, because data that Grain repeats has no end.
        return range(count)
    bits = np.random.PCG64([seed, *numbers])
    order: Sequence[int] = np.random.Generator(bits).permutation(count)  # pyright: ignore[reportAssignmentType]
    return order
