"""The bound of memory: what a closure must copy, copied, and nothing else."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np


class Copies:
    """Each call copies the variables once, and as many bytes of gradients back.

    As many threads as workers share the calls. They share the variables, and each has
    its own memory for everything else.
    """

    facts: dict[str, Any]

    def setup(self, shapes: list[tuple[int, ...]], num_workers: int) -> None:
        """Makes the arrays, and touches all of their memory."""
        self._variables = [np.ones(shape, np.float32) for shape in shapes]
        self._own = [
            [(np.ones_like(v), np.ones_like(v)) for v in self._variables]
            for _ in range(num_workers)
        ]
        self._pool = ThreadPoolExecutor(num_workers)
        self.facts = {"threads": num_workers}

    def run(self, num_calls: int) -> float:
        """Copies for so many calls; returns how many."""
        shares = [
            len(range(i, num_calls, len(self._own))) for i in range(len(self._own))
        ]
        return float(sum(self._pool.map(self._copy, range(len(self._own)), shares)))

    def _copy(self, worker: int, num_calls: int) -> int:
        for _ in range(num_calls):
            for variable, (read, gradient) in zip(
                self._variables, self._own[worker], strict=True
            ):
                np.copyto(read, variable)
                np.copyto(gradient, read)
        return num_calls
