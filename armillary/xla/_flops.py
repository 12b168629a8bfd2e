"""Counts the floating point operations of a traced step.

Only products and convolutions count, as in most published figures. `count_flops`
counts all operations of the trace. `count_model_flops` leaves out a forward pass that
`jax.checkpoint` computes again, because MFU counts the work of the model alone.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from armillary._jax_compat import get_mapped_axes
from armillary._jaxpr import is_called_by_library, programs_in
from armillary._passes import is_repeated

_PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated"}


def count_flops(program: Any, *, counts_recomputed: bool = True) -> dict[str, float]:
    """Returns operations of one step on one replica, by the dtype of the operands."""
    # A loop of unknown length counts once. The largest of several branches counts.
    total: defaultdict[str, float] = defaultdict(float)
    for equation in getattr(program, "jaxpr", program).eqns:
        inner = list(find_programs(equation))
        is_product = equation.primitive.name in _PRODUCTS
        if not (inner or is_product):
            continue
        if not counts_recomputed and is_repeated(equation):
            continue
        parts = [
            count_flops(program, counts_recomputed=counts_recomputed)
            for program in inner
        ]
        if equation.primitive.name == "cond":
            parts = [max(parts, key=lambda counts: sum(counts.values()))]
        elif is_product:
            parts = [{str(equation.invars[0].aval.dtype): _count_product(equation)}]
        for part in parts:
            for dtype, count in part.items():
                total[dtype] += count_runs(equation) * count
    return dict(total)


def count_model_flops(program: Any) -> float:
    """Returns operations of one step on one replica, each counted once."""
    return sum(count_flops(program, counts_recomputed=False).values())


def find_programs(equation: Any) -> Iterator[Any]:
    """Yields the programs that an equation runs."""
    if equation.primitive.name == "custom_linear_solve":
        yield equation.params["jaxprs"].solve  # The others are for derivatives.
    else:
        yield from programs_in(equation)


def count_runs(equation: Any) -> int:
    """Returns how often an equation runs its programs, or 1 if it is unknown."""
    if equation.primitive.name == "scan":
        return equation.params["length"]
    if equation.primitive.name == "pallas_call":
        grid = equation.params["grid_mapping"].grid
        return math.prod(size for size in grid if isinstance(size, int))
    # In a `shard_map` of the user, each device runs the program with its part. The one
    # of a strategy runs the step of each replica.
    if equation.primitive.name == "shard_map" and not is_called_by_library(equation):
        sizes = equation.params["mesh"].shape
        return math.prod(sizes[axis] for axis in get_mapped_axes(equation))
    return 1


def _count_product(equation: Any) -> float:
    """Returns the operations of a product or a convolution: two for each term."""
    left, right = (variable.aval for variable in equation.invars[:2])
    out = equation.outvars[0].aval
    if equation.primitive.name == "conv_general_dilated":
        numbers = equation.params["dimension_numbers"]
        # Each value of the result sums over a kernel's window and its input channels.
        window = [right.shape[axis] for axis in numbers.rhs_spec[1:]]
        groups = equation.params["batch_group_count"]
        dilation = math.prod(equation.params["lhs_dilation"])
        return 2.0 * out.size * math.prod(window) / groups / dilation

    numbers = equation.params.get("dimension_numbers")
    groups = 1
    if numbers is None:
        ragged = equation.params["ragged_dot_dimension_numbers"]
        numbers = ragged.dot_dimension_numbers
        (axes_of_left, _), _ = numbers
        # In the gradient of the weights, each row is a term of one group only.
        if set(ragged.lhs_ragged_dimensions) & set(axes_of_left):
            groups = equation.invars[2].aval.shape[-1]
    (axes_of_left, _), _ = numbers
    contracted = [left.shape[axis] for axis in axes_of_left]
    return 2.0 * out.size * math.prod(contracted) / groups
