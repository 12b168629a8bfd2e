"""Grain datasets and loaders as sources.

A `MapDataset` must be batched (`dataset.batch(size)`). Every pass gives what the
dataset gives: an order that changes with the epoch is made in Grain, with `shuffle` and
`repeat`.

Nothing here imports Grain: an object can only be one of its classes if the program has
imported it already.
"""

import sys
from typing import Any

from armillary.data.sources._iterable import IterableSource

_KINDS = ("MapDataset", "IterDataset", "DataLoader")


def as_grain_source(source: Any) -> IterableSource | None:
    """Returns a source if `source` belongs to Grain, or None."""
    grain = sys.modules.get("grain")
    for kind in _KINDS:
        if grain is not None and isinstance(source, getattr(grain, kind)):
            # Each batch of Grain is a new one.
            name = f"grain.{kind}"
            return IterableSource(lambda: iter(source), name, copies=False)
    return None
