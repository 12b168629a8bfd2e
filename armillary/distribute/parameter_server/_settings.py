"""How many workers and servers there are, and how calls are given to them."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How calls are given out.

    Attributes:
        num_workers: Number of workers.
        num_ps: Number of parameter servers.
        max_staleness: Most updates between a call's reading and its writing; `None` for
            any number, 0 to make the calls of all workers one update.
        report_seconds: After how long a call is reported that has not ended.
        worker_options: Ray's options of worker actors.
        ps_options: Ray's options of parameter-server actors.
        has_cluster: Whether each task has a machine of its own, named by a resource.
    """

    num_workers: int
    num_ps: int
    max_staleness: int | None
    report_seconds: float
    worker_options: dict[str, Any]
    ps_options: dict[str, Any]
    has_cluster: bool = False

    def options_of(self, job: str, index: int) -> dict[str, Any]:
        """Returns Ray's options of the actor of a task."""
        options = self.worker_options if job == "worker" else self.ps_options
        if not self.has_cluster:
            return options
        own = {f"armillary_{job}_{index}": 1.0}
        return {**options, "resources": {**options.get("resources", {}), **own}}

    @property
    def is_synchronous(self) -> bool:
        """Whether calls run in rounds, one on each worker."""
        return self.max_staleness == 0
