"""Finds the collectives of a step that was traced and not compiled.

There is one for each array, as JAX writes them. A compiler combines those that need
nothing of each other.
"""

from typing import Any

from jax.extend import core

from armillary._dataflow import Walk
from armillary.plan._traffic import Collective

_KINDS = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def find_traced(program: core.ClosedJaxpr, num_devices: int) -> list[Collective]:
    """Returns the collectives of a traced step that so many devices run."""
    if num_devices == 1:
        return []
    return _Collectives(program, num_devices).found


class _Collectives(Walk):
    def __init__(self, program: core.ClosedJaxpr, num_devices: int) -> None:
        self.found: list[Collective] = []
        self._num_devices = num_devices
        super().__init__(program)

    def visit(self, equation: Any) -> bool:
        kind = _KINDS.get(equation.primitive.name)
        if kind is None:
            return False
        is_conditional = any(each.primitive.name == "cond" for each in self.within)
        variables = equation.outvars if kind == "all-gather" else equation.invars
        for variable in variables:
            size = variable.aval.size * variable.aval.dtype.itemsize
            self.found.append(
                Collective(
                    kind, size, "step", self.times, is_conditional, self._num_devices
                )
            )
        return False
