"""Finds the collectives of a step that was traced and not compiled.

There is one for each array, as JAX writes them. A compiler combines those that need
nothing of each other.

Counts the arithmetic of a traced step: its products and convolutions.

All else that a step computes is bounded by the memory that it reads, not by arithmetic.
The program is read as the user wrote it, so what a compiler computes again to save
memory does not count.

Counts the bytes that a step moves between a device's memory and its cores.

A fusion reads its operands once and writes its result once; of a stack of batches that
it slices it reads the slice. What the compiler keeps in on-chip memory does not count.
"""

import math
from collections import defaultdict
from typing import Any

from jax.extend import core

from armillary._dataflow import Walk
from armillary.plan._traffic import FREE, Collective, Instruction, Module, count_bytes

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


_ON_CHIP = "S(1)"  # How TPU's compiler marks its vector memory.
_SLICES = ("dynamic-slice", "slice", "gather")


def count_step_bytes(module: Module, depth: int) -> int:
    """Returns the bytes that one step reads and writes in a device's memory."""
    counter = _Counter(module)
    names = [module.entry]
    for _ in range(depth):
        loops = [
            each
            for name in names
            for inner in _reachable(module, name)
            for each in module.computations[inner]
            if each.opcode == "while"
        ]
        names = [name for each in loops for name in each.called["body"]]
    return sum(counter.of_computation(name) for name in names)


def _reachable(module: Module, name: str) -> list[str]:
    """Returns a computation and those that it runs, but for bodies of loops."""
    names = [name]
    for each in module.computations.get(name, []):
        for role, called in each.called.items():
            if role not in ("body", "calls"):
                names += [n for inner in called for n in _reachable(module, inner)]
    return names


class _Counter:
    def __init__(self, module: Module) -> None:
        self._computations = module.computations

    def of_computation(self, name: str) -> int:
        instructions = self._computations.get(name, [])
        shapes = {each.name: each.shape for each in instructions}
        return sum(self._of(each, shapes) for each in instructions)

    def _of(self, each: Instruction, shapes: dict[str, str]) -> int:
        opcode, called = each.opcode, each.called
        if opcode in FREE or opcode == "call":
            return sum(self.of_computation(n) for n in called.get("calls", []))
        if opcode == "while":
            return (each.trip_count or 1) * self.of_computation(called["body"][0])
        if opcode == "conditional":
            branches = [
                self.of_computation(n) for part in called.values() for n in part
            ]
            return max(branches, default=0)
        written = 0 if opcode.endswith("-start") else _bytes(_result(each))
        if opcode.endswith("-done"):
            return written
        if opcode in _SLICES:
            return 2 * written
        if opcode == "dynamic-update-slice":
            return 2 * _bytes(shapes[each.operands[1]])
        if opcode == "fusion":
            return self._of_fusion(each, shapes, written)
        return written + sum(_bytes(shapes[name]) for name in each.operands)

    def _of_fusion(
        self, each: Instruction, shapes: dict[str, str], written: int
    ) -> int:
        body = self._computations[each.called["calls"][0]]
        root = next(one for one in body if one.is_root)
        if root.opcode == "dynamic-update-slice":
            written = _bytes({one.name: one.shape for one in body}[root.operands[1]])
        read = 0
        for index, name in enumerate(each.operands):
            whole = _bytes(shapes[name])
            read += min(whole, self._read_of(each.called["calls"][0], index, whole))
        return written + read

    def _read_of(self, name: str, index: int, whole: int) -> int:
        """Returns how much of a parameter a fused computation reads."""
        body = self._computations[name]
        parameter = next((one.name for one in body if one.number == index), None)
        total = 0
        for one in body:
            if parameter not in one.operands:
                continue
            place = one.operands.index(parameter)
            if one.opcode in _SLICES and place == 0:
                total += count_bytes(one.shape)
            elif one.opcode == "dynamic-update-slice" and place == 0:
                continue
            elif one.opcode == "fusion":
                total += self._read_of(one.called["calls"][0], place, whole)
            else:
                return whole
        return total


def _bytes(shape: str) -> int:
    return count_bytes(shape, skip_space=_ON_CHIP)


def _result(each: Instruction) -> str:
    """Returns the type of what an operation leaves, without a library's workspace."""
    if each.opcode == "custom-call" and each.shape.startswith("("):
        return each.shape.rsplit(", ", 1)[0]
    return each.shape


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
