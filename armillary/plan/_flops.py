"""Counts the arithmetic of a traced step: its products and convolutions.

All else that a step computes is bounded by the memory that it reads, not by arithmetic.
The program is read as the user wrote it, so what a compiler computes again to save
memory does not count.
"""

import math
from collections import defaultdict
from typing import Any

from armillary._dataflow import Walk

_PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated"}


def count_flops(program: Any) -> dict[str, float]:
    """Returns operations of one step on one replica, by the dtype of the operands.

    A multiplication and an addition are two operations. A loop whose length is not
    known while tracing counts as one round, a branch as the larger one.
    """
    return dict(_Flops(program).total)


class _Flops(Walk):
    def __init__(self, program: Any) -> None:
        self.total: defaultdict[str, float] = defaultdict(float)
        super().__init__(program)

    def visit(self, equation: Any) -> bool:
        found: dict[str, float] = {}
        is_branch = equation.primitive.name == "cond"
        if is_branch:
            branches = map(count_flops, equation.params["branches"])
            found = max(branches, key=lambda counts: sum(counts.values()))
        elif equation.primitive.name in _PRODUCTS:
            found = {str(equation.invars[0].aval.dtype): _count_product(equation)}
        for dtype, count in found.items():
            self.total[dtype] += self.times * count
        return is_branch


def _count_product(equation: Any) -> float:
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
    if numbers is None:
        numbers = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    contracted = [left.shape[axis] for axis in numbers[0][0]]
    return 2.0 * out.size * math.prod(contracted)
