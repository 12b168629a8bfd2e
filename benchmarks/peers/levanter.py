"""Levanter, which cannot take part yet: the reason is an answer for the report."""

from typing import Any

from benchmarks.peers._jax_model import JaxPeer
from benchmarks.protocol import Options, UnsupportedError
from benchmarks.tasks import Task


class LevanterContestant(JaxPeer):
    """Says why there is no comparison. It needs no environment for that."""

    library = "levanter"

    def run(self, num_steps: int) -> float:
        raise NotImplementedError("`setup` has raised an error before.")

    def _build(self, task: Task, options: Options) -> dict[str, Any]:
        raise UnsupportedError(
            "Levanter 1.1, its newest stable release on PyPI (October 2023), cannot be "
            "imported with JAX 0.10: its package `haliax` 1.3 reads a name of JAX that "
            "is gone. Compare it once there is a newer stable release."
        )
