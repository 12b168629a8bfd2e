"""Classes of JAX's operations, by which the analyses of a step follow values.

Each class is one table, which all analyses share.
"""

from typing import Any

from armillary._jaxpr import IDENTITIES, named_axes, programs_in, walk_equations
from armillary.distribute.analysis._marks import MADE_BY_OPS

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

DRAWS = ("random_bits", "random_gamma", "rng_bit_generator")
"""Operations that draw random numbers from a key."""

REDUCTIONS = ("psum", "pmin", "pmax", "all_gather")
"""Beginnings of operations that combine the values of all replicas that take part.

They have the same result on all these replicas.
"""

BROADCASTS = ("pbroadcast",)
"""Operations that give the value of one replica to all that take part."""

SCATTERS = ("reduce_scatter", "all_to_all")
"""Operations that give each replica its own part of the same result."""

EXCHANGES = (*SCATTERS, "ppermute", "ragged_all_to_all", "psend", "precv")
"""Exchanges in which each replica gets a different result."""

COLLECTIVES = (*REDUCTIONS, *BROADCASTS, *EXCHANGES)
"""Beginnings of operations in which replicas wait for each other."""

MOVES = ("reshape", "squeeze", "broadcast_in_dim", "transpose")
"""Operations that put all numbers of a value into another shape."""

COPIES = (*IDENTITIES, *MOVES, "convert_element_type")
"""Operations that change the shape or the dtype of a value, but not its numbers."""

ADDITIONS = ("add", "add_any", "sub")
"""Sums and differences of two values."""

PRODUCTS = ("mul", "dot_general", "conv_general_dilated")
"""Products of two values."""

SUMS = ("reduce_sum", "dot_general", "conv_general_dilated")
"""Operations that sum along an axis."""

EXTREMES = ("reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin")
"""Other operations that reduce an axis."""

CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
"""Operations that accumulate along an axis."""

LINEAR = frozenset(
    {*COPIES, *ADDITIONS, "neg", "real", "imag", "conj", "complex", "slice", "rev"}
    | {"concatenate", "pad", "split", "reduce_sum", "cumsum", "reduce_precision"}
)
"""Operations that are linear in all operands together."""

SCALING = frozenset(
    {"abs", "max", "min", "clamp", "reduce_max", "reduce_min", "cummax", "cummin"}
)
"""Operations that are not linear, but `f(2 * x)` is `2 * f(x)`."""

CURVED = frozenset(
    {"integer_pow", "pow", "square", "sqrt", "rsqrt", "cbrt", "sign", "nextafter"}
    | {"exp", "exp2", "expm1", "log", "log1p", "logistic", "cumprod", "cumlogsumexp"}
    | {"sin", "cos", "tan", "asin", "acos", "atan", "atan2", "reduce_prod"}
    | {"sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "floor", "ceil", "round"}
    | {"erf", "erfc", "erf_inv", "lgamma", "digamma", "polygamma", "zeta", "rem"}
    | {"bessel_i0e", "bessel_i1e", "igamma", "igammac", "regularized_incomplete_beta"}
)
"""Operations where a factor of the operand is not a factor of the result."""

NONLINEAR = SCALING | CURVED


def is_collective(equation: Any, axis_name: str) -> bool:
    """Returns whether an operation exchanges values over an axis.

    An operation of a new release of JAX is not in the tables, but has the axis as well.
    """
    # A cast between JAX's types of values names the axis, too.
    is_cast = equation.primitive.name in IDENTITIES
    is_listed = equation.primitive.name.startswith(COLLECTIVES)
    return is_listed or (axis_name in named_axes(equation) and not is_cast)


def is_equal_after(equation: Any, axis_name: str) -> bool:
    """Returns whether an operation gives all replicas the same result.

    A collective over groups of replicas does not.
    """
    if not equation.primitive.name.startswith((*REDUCTIONS, *BROADCASTS)):
        return False
    has_groups = equation.params.get("axis_index_groups") is not None
    return axis_name in named_axes(equation) and not has_groups


def has_collective(equation: Any) -> bool:
    """Returns whether replicas wait for each other in the programs of an equation."""
    return any(
        inner.primitive.name.startswith(COLLECTIVES)
        for program in programs_in(equation)
        for inner in walk_equations(program)
    )


def reduced_by_ops(equation: Any) -> str:
    """Returns `"sum"`, `"mean"`, ... if a `CrossDeviceOps` reduces in an equation.

    It returns an empty string for other equations. `replica/_own_ops.py` makes the
    equation, and a mark in it names the operation.
    """
    if equation.primitive.name != "custom_jvp_call":
        return ""
    for program in programs_in(equation):
        for inner in getattr(program, "jaxpr", program).eqns:
            if inner.primitive.name == "name":
                return MADE_BY_OPS.get(inner.params["name"], "")
    return ""
