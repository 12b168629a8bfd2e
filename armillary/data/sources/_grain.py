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
            made = IterableSource(lambda: iter(source), name, copies=False)
            if kind != "DataLoader":  # Its positions have it, and Grain compares.
                made.order_of_examples = _find_order(source, grain)
            return made
    return None


def _find_order(dataset: Any, grain: Any) -> dict[str, list[int]]:
    """Returns what the meaning of a position depends on, which Grain does not save.

    A `MapDataset` counts what it gives, so batches of another size are other places.
    """
    order: dict[str, list[int]] = {}
    nodes = [dataset]
    for node in nodes:
        parents = getattr(node, "parents", ())
        nodes.extend(parents)
        is_map = isinstance(node, grain.MapDataset)
        found = {
            "shuffle seed": "Shuffle" in type(node).__name__ and node._seed,
            "batch size": is_map and getattr(node, "_batch_size", False),
            "examples": is_map and not parents and len(node),
        }
        for name, value in found.items():
            if value is not False:
                order.setdefault(name, []).append(value)
    return order
