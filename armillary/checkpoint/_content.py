"""The values of a checkpoint at one moment."""

import dataclasses
from typing import Any

from armillary.checkpoint._leaf import LeafSpec, describe_leaf


@dataclasses.dataclass(frozen=True)
class Content:
    """The values of a checkpoint at one moment.

    Attributes:
        leaves: The arrays by path, as the slots hold them.
        states: What each object's `get_state` returned, in the types of JSON.
        stored: The plain arrays to store for the leaves, if they were made already.
    """

    leaves: dict[str, Any]
    states: dict[str, Any]
    stored: dict[str, Any] | None = None

    @property
    def specs(self) -> dict[str, LeafSpec]:
        """The description of each leaf."""
        return {path: describe_leaf(leaf) for path, leaf in self.leaves.items()}
