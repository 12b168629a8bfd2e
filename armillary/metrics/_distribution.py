"""A histogram of all values that a loop has seen."""

from typing import Any

from armillary.metrics._counts import Counts
from armillary.metrics._labeled import CountingMetric
from armillary.summary._kinds import NUM_BUCKETS, Histogram, as_arrays, count_values
from armillary.typing import PyTree


class Distribution(CountingMetric):
    """How many values lie where, over all steps and replicas since the last reset."""

    def __init__(self) -> None:
        self.counts = Counts.zeros(NUM_BUCKETS)

    def update(self, *, values: PyTree, **_: Any) -> None:
        """Counts the elements of arrays, such as gradients or activations.

        Args:
            values: An array, or a pytree of arrays. In replica context each replica
                counts its own; what is equal on all is counted once by each.
            **_: What an `nnx.MultiMetric` has for other metrics.

        Raises:
            TypeError: If a leaf is no array of numbers.
            ValueError: If the arrays have no elements.
        """
        self.counts.add(count_values(as_arrays("values", values)))

    def compute(self) -> Histogram:
        """Returns the histogram, for an output or a `SummaryManager`.

        Raises:
            TypeError: If called while JAX traces.
        """
        return Histogram.from_counts(self.counts.read())
