"""Finds the collectives of a step that was traced and not compiled.

There is one for each array, as JAX writes them. A compiler combines those that need
nothing of each other.
"""

from collections.abc import Iterator
from typing import Any

from jax.extend import core

from armillary._jaxpr import programs_in
from armillary.plan._traffic import Collective

_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def find_traced(program: core.ClosedJaxpr, num_devices: int) -> list[Collective]:
    """Returns the collectives of a traced step that so many devices run."""
    if num_devices == 1:
        return []
    return list(_find(program, num_devices, 1, False))


def _find(
    program: Any, num_devices: int, times: int, is_conditional: bool
) -> Iterator[Collective]:
    for equation in getattr(program, "jaxpr", program).eqns:
        name = equation.primitive.name
        kind = _KINDS.get(name)
        if kind is not None:
            variables = equation.outvars if kind == "all-gather" else equation.invars
            for variable in variables:
                size = variable.aval.size * variable.aval.dtype.itemsize
                yield Collective(kind, size, "step", times, is_conditional, num_devices)
            continue
        inner = times * (equation.params["length"] if name == "scan" else 1)
        for part in programs_in(equation):
            yield from _find(part, num_devices, inner, is_conditional or name == "cond")
