"""Operations of JAX that make values equal on all replicas, or different."""

from typing import Any

from armillary._jaxpr import named_axes, walk_equations

NUMBER = frozenset({"the number of the replica, or random keys made with it"})
_PYTHON = frozenset({"a callback to Python"})
_DEVICE = frozenset({"the device"})

SOURCES = {
    "axis_index": NUMBER,
    "pure_callback": _PYTHON,
    "io_callback": _PYTHON,
    "infeed": _DEVICE,
    "rng_uniform": _DEVICE,
    "ffi_call": _DEVICE,
}
"""Operations whose results may differ for any operands, and the reason."""

REDUCTIONS = ("psum", "pmin", "pmax", "all_gather")
"""Beginnings of operations with the same result on all replicas that take part."""

EXCHANGES = ("ppermute", "all_to_all", "ragged_all_to_all", "reduce_scatter")
"""Exchanges in which each replica gets a different result."""

DRAWS = ("random_bits", "random_gamma", "rng_bit_generator")
"""Operations that draw random numbers from a key."""


def is_over_all(equation: Any, axis_name: str) -> bool:
    """Returns whether a collective is over all replicas, and not over groups."""
    has_groups = equation.params.get("axis_index_groups") is not None
    return axis_name in named_axes(equation) and not has_groups


def has_collective(program: Any) -> bool:
    """Returns whether replicas wait for each other in a program."""
    return any(
        equation.primitive.name.startswith((*REDUCTIONS, *EXCHANGES))
        for equation in walk_equations(program)
    )
