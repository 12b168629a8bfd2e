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
        name = equation.primitive.name
        inner = list(find_programs(equation))
        is_product = name in _PRODUCTS
        if not (inner or is_product):
            continue
        is_left_out = not counts_recomputed and is_repeated(equation)
        if is_left_out:
            continue

        parts: list[dict[str, float]] = []
        for part in inner:
            parts.append(count_flops(part, counts_recomputed=counts_recomputed))
        if name == "cond":
            parts = [max(parts, key=_add_up)]
        elif is_product:
            dtype = str(equation.invars[0].aval.dtype)
            parts = [{dtype: _count_product(equation)}]

        num_runs = count_runs(equation)
        for counts in parts:
            for dtype, count in counts.items():
                total[dtype] += num_runs * count
    return dict(total)


def count_model_flops(program: Any) -> float:
    """Returns operations of one step on one replica, each counted once."""
    return _add_up(count_flops(program, counts_recomputed=False))


def _add_up(counts: dict[str, float]) -> float:
    return sum(counts.values())


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
    if equation.primitive.name == "conv_general_dilated":
        return _count_convolution(equation)

    numbers = equation.params.get("dimension_numbers")
    groups = 1
    if numbers is None:
        ragged = equation.params["ragged_dot_dimension_numbers"]
        numbers = ragged.dot_dimension_numbers
        (axes_of_left, _), _ = numbers
        # In the gradient of the weights, each row is a term of one group only.
        if set(ragged.lhs_ragged_dimensions) & set(axes_of_left):
            group_sizes = equation.invars[2].aval
            groups = group_sizes.shape[-1]

    left = equation.invars[0].aval
    out = equation.outvars[0].aval
    (axes_of_left, _), _ = numbers
    num_terms = math.prod(left.shape[axis] for axis in axes_of_left)
    return 2.0 * out.size * num_terms / groups


def _count_convolution(equation: Any) -> float:
    kernel = equation.invars[1].aval
    out = equation.outvars[0].aval
    numbers = equation.params["dimension_numbers"]
    # Each value of the result sums over a kernel's window and its input channels.
    num_terms = math.prod(kernel.shape[axis] for axis in numbers.rhs_spec[1:])
    groups = equation.params["batch_group_count"]
    # Dilation puts zeros between the elements of the images. They are not terms.
    dilation = math.prod(equation.params["lhs_dilation"])
    return 2.0 * out.size * num_terms / groups / dilation
