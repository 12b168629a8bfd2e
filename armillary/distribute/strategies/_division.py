"""The division of a parameter over devices, followed through operations.

A value that is made from a parameter alone, such as its cast to `bfloat16` or a row of
its stack of layers, can stay divided like the parameter.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from armillary._dataflow import union
from armillary.distribute.analysis._operations import (
    CUMULATIVE,
    CURVED,
    EXTREMES,
    LINEAR,
    MOVES,
    SCALING,
    SUMS,
)


class Division(NamedTuple):
    """The division of a value over the axes of a mesh.

    Attributes:
        entries: The entries of a `PartitionSpec`, one for each axis of the value.
        constants: The operands of the innermost loop, by number, that the value is made
            from. It is empty for a value that differs between iterations.
    """

    entries: tuple[Any, ...]
    constants: frozenset[int] = frozenset()


Fact: TypeAlias = Division | None
"""The division of a value; `None` for values that XLA divides by itself."""

_Rule: TypeAlias = Callable[[Any, Division], tuple[Any, ...] | None]

_CHANGE_SHAPE = frozenset(
    {*MOVES, *SUMS, *EXTREMES, *CUMULATIVE, "rev", "slice", "concatenate", "pad"}
    | {"split", "sharding_constraint", "optimization_barrier"}
)
_ELEMENTWISE = (LINEAR | SCALING | CURVED) - _CHANGE_SHAPE | frozenset(
    {"mul", "div", "select_n", "name", "is_finite", "not", "and", "or", "xor"}
    | {"eq", "ne", "lt", "le", "gt", "ge"}
)


def follow(equation: Any, facts: Sequence[Fact]) -> list[Fact] | None:
    """Returns the facts about the results of an operation without programs.

    It returns `None` if an operation needs its operands whole.
    """
    name = equation.primitive.name
    if name == "optimization_barrier":
        return list(facts)  # It has a result for each operand.
    divided = [fact for fact in facts if fact is not None]
    first = divided[0]
    if any(fact.entries != first.entries for fact in divided):
        return None

    entries = None
    if name in _ELEMENTWISE and _has_one_shape(equation):
        entries = first.entries
    elif name == "concatenate":
        joined_axis = equation.params["dimension"]
        is_joined_whole = first.entries[joined_axis] is None
        are_all_divided = len(divided) == len(facts)
        if is_joined_whole and are_all_divided:
            entries = first.entries
    elif name in _RULES and facts[0] is not None:
        entries = _RULES[name](equation, first)
    if entries is None:
        return None
    return [Division(entries, _find_constants(divided))]


def _find_constants(divided: Sequence[Division]) -> frozenset[int]:
    """Returns the constants that a value is made from, if it is made from no others."""
    if not all(fact.constants for fact in divided):
        return frozenset()
    return union(fact.constants for fact in divided)


def _has_one_shape(equation: Any) -> bool:
    """Returns whether all operands are numbers or have the shape of the result."""
    shape = equation.outvars[0].aval.shape
    return all(
        operand.aval.ndim == 0 or operand.aval.shape == shape
        for operand in equation.invars
    )


def _transpose(equation: Any, division: Division) -> tuple[Any, ...]:
    return tuple(division.entries[axis] for axis in equation.params["permutation"])


def _reshape(equation: Any, division: Division) -> tuple[Any, ...] | None:
    """Follows a reshape that keeps each divided axis, or makes it a leading part."""
    if equation.params.get("dimensions") is not None:
        return None
    old = equation.invars[0].aval.shape
    new = equation.outvars[0].aval.shape
    old_sizes = _count_behind(old)
    new_sizes = _count_behind(new)
    found: list[Any] = [None] * len(new)
    for axis, entry in enumerate(division.entries):
        if entry is None:
            continue
        # The new axis must cover the same elements, and devices must be able to divide
        # it as they divide the old one.
        target = None
        for new_axis, size in enumerate(new_sizes):
            has_same_size = size == old_sizes[axis]
            if has_same_size and new[new_axis] % old[axis] == 0:
                target = new_axis
        if target is None:
            return None
        found[target] = entry
    return tuple(found)


def _count_behind(shape: Sequence[int]) -> list[int]:
    """Returns the number of elements of each axis and the axes behind it."""
    sizes = itertools.accumulate(reversed(shape), operator.mul)
    return list(reversed(list(sizes)))


def _squeeze(equation: Any, division: Division) -> tuple[Any, ...] | None:
    """Follows the removal of axes that devices do not share."""
    removed = set(equation.params["dimensions"])
    kept: list[Any] = []
    for axis, entry in enumerate(division.entries):
        if axis not in removed:
            kept.append(entry)
        elif entry is not None:
            return None
    return tuple(kept)


def _add_axes(equation: Any, division: Division) -> tuple[Any, ...] | None:
    """Follows a broadcast that only adds axes of size 1."""
    old = equation.invars[0].aval
    new = equation.outvars[0].aval
    if old.size != new.size:
        return None
    found: list[Any] = [None] * new.ndim
    targets = equation.params["broadcast_dimensions"]
    for target, entry in zip(targets, division.entries, strict=True):
        found[target] = entry
    return tuple(found)


def _slice(equation: Any, division: Division) -> tuple[Any, ...] | None:
    """Follows a slice along axes that devices do not share."""
    old = equation.invars[0].aval.shape
    new = equation.outvars[0].aval.shape
    for entry, before, after in zip(division.entries, old, new, strict=True):
        if entry is not None and before != after:
            return None
    return division.entries


_RULES: dict[str, _Rule] = {
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "broadcast_in_dim": _add_axes,
    "slice": _slice,
    "dynamic_slice": _slice,
}
