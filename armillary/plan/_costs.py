"""The collectives in the traced program of a step."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from armillary._jaxpr import named_axes
from armillary.xla._flops import count_runs, find_programs

COLLECTIVE_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "ragged-all-to-all",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_KIND_OF = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "pbroadcast": "collective-broadcast",
    "ppermute": "collective-permute",
}


@dataclass(frozen=True)
class Collective:
    """One collective operation.

    Attributes:
        kind: The name of the operation, such as `all-reduce`.
        num_bytes: Bytes of its operand on each device; of its result for all-gather.
        scope: The part of the program in which it runs: each `step`, `loop` or `call`.
        times: The number of runs in that part; inner loops repeat it.
        is_conditional: True if it runs only under a condition on the device.
        group_size: The number of devices in one of its groups.
        is_asynchronous: True if other work runs between its start and its end.
        round: One more than the last round of the same kind that it has to wait for.
            Collectives of one round are independent, so a compiler may combine them.
            The compilers for TPUs and NVIDIA GPUs do so, but the compiler for CPUs
            does not. The number of rounds is the same for all compilers.
        is_slow: True if devices of one of its groups have slow links between them.
    """

    kind: str
    num_bytes: int
    scope: str
    times: int = 1
    is_conditional: bool = False
    group_size: int = 0
    is_asynchronous: bool = False
    round: int = 1
    is_slow: bool = False

    @property
    def is_of_step(self) -> bool:
        """True if the collective runs in every step."""
        return self.scope == "step" and not self.is_conditional


def count_rounds(collectives: Iterable[Collective], kind: str) -> int:
    """Returns the number of collectives of a kind that must follow each other."""
    return max(
        (collective.round for collective in collectives if collective.kind == kind),
        default=0,
    )


def find_traced(
    program: Any,
    sizes: Mapping[str, int],
    dcn: Mapping[str, int],
    times: int = 1,
    is_conditional: bool = False,
) -> Iterator[Collective]:
    """Yields the collectives of a traced step, one for each array.

    `sizes` has the number of devices along each axis of the mesh, and `dcn` the number
    of groups along the axes with slow links.
    """
    for equation in getattr(program, "jaxpr", program).eqns:
        kind = _KIND_OF.get(equation.primitive.name)
        axes = named_axes(equation) if kind is not None else ()
        group_size = math.prod(sizes.get(axis, 1) for axis in axes)
        if kind is not None and group_size > 1:
            groups = equation.params.get("axis_index_groups")
            if groups:
                group_size = len(groups[0])
            variables = equation.outvars if kind == "all-gather" else equation.invars
            if kind == "ragged-all-to-all":
                # The other operands are the place of the result, and sizes.
                variables = variables[:1]
            for variable in variables:
                num_bytes = variable.aval.size * variable.aval.dtype.itemsize
                yield Collective(
                    kind,
                    num_bytes,
                    scope="step",
                    times=times,
                    is_conditional=is_conditional,
                    group_size=group_size,
                    is_slow=any(dcn.get(axis, 1) > 1 for axis in axes),
                )
        runs = times * count_runs(equation)
        is_branch = is_conditional or equation.primitive.name == "cond"
        for inner in find_programs(equation):
            yield from find_traced(inner, sizes, dcn, runs, is_branch)
