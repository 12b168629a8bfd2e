"""Names for the types that cross module borders."""

from collections.abc import Callable
from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""Any nest of containers that `jax.tree` understands."""

Batch: TypeAlias = PyTree
"""A pytree of arrays whose leading axis counts examples."""

Output: TypeAlias = dict[str, Any] | None
"""The output of a loop: scalars by name, in nested dictionaries if you like.

A `Histogram`, an `Image` or a `Text` of `armillary.summary` may be among them. So may
arrays with axes, which a `SummaryManager` writes as histograms.
"""

Action: TypeAlias = Callable[[Output], None]
"""A function that the controller calls between loops, with the last output."""
