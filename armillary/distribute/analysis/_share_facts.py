"""Facts about one value of a step, and the ways in which operations change them.

`_shares.py` follows these facts through the program of a step.
"""

import enum
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

from armillary._dataflow import union
from armillary._jax_compat import read_real
from armillary.distribute.analysis._operations import (
    COPIES,
    CUMULATIVE,
    LINEAR,
    NONLINEAR,
    PRODUCTS,
)
from armillary.distribute.analysis._users import is_of_mean

# Operations that hand on a number that something is multiplied by.
_SCALES = ("mul", "div", "broadcast_in_dim", "convert_element_type")
# Operations between the reciprocal of a sum and the weights that it gives. The root of
# a variance is not among them: statistics may normalize examples.
_RECIPROCALS = ("div", "integer_pow", "max", "min", "clamp")
# Operations that leave differences from a mean what they are.
_KEEPING = (*COPIES, "real", "neg", "reduce_sum")
_SQUARES = ("square", "integer_pow", "abs")
# The divisor of a value that was scaled by a number which is not known.
ANY = 0


class Reach(enum.IntEnum):
    """The dependence of a value on the examples of a share: see `_shares.py`."""

    EQUAL = 0
    REDUCED = 1
    EXAMPLES = 2
    UNKNOWN = 3


class CauseKind(enum.Enum):
    """The way in which a number depends on the share."""

    NONLINEAR = "nonlinear"
    QUOTIENT = "quotient"
    EXTREME = "extreme"
    VARIANCE = "variance"
    PAIRS = "pairs"
    ORDER = "order"
    LOOP = "loop"
    WEIGHTS = "weights"
    GRADIENT = "gradient"
    LOSS = "loss"


# These stay with a value for each example; the others go when it is normalized.
LASTING = (
    CauseKind.PAIRS,
    CauseKind.ORDER,
    CauseKind.LOOP,
    CauseKind.WEIGHTS,
    CauseKind.GRADIENT,
    CauseKind.LOSS,
)


class Cause(NamedTuple):
    """An operation that makes a number depend on the share, and its line."""

    kind: CauseKind
    operation: str
    line: str


class Total(NamedTuple):
    """A sum over the examples of one replica that replicas have reduced by a mean.

    Attributes:
        line: The line of the reduction.
        sizes: The numbers of examples that were summed.
        divisors: The numbers that it was divided by.
        is_mean: Whether the sum over replicas was divided by their number yet.
    """

    line: str
    sizes: frozenset[int]
    divisors: frozenset[int]
    is_mean: bool


class ShareFacts(NamedTuple):
    """The known facts about a value.

    Attributes:
        reach: How it depends on the examples.
        axes: The axes along which examples lie, counted from the last one, -1.
        causes: The operations that make it depend on the share.
        divisors: The numbers that it was divided by.
        sizes: Numbers of examples that were summed.
        is_gradient: Whether it was made in a backward pass.
        is_carried: Whether a loop over examples hands it from one to the next.
        combined: The causes of values that a reduction over replicas has combined.
        totals: The sums in a value that is equal on all replicas.
    """

    reach: Reach = Reach.EQUAL
    axes: frozenset[int] = frozenset()
    causes: frozenset[Cause] = frozenset()
    divisors: frozenset[int] = frozenset()
    sizes: frozenset[int] = frozenset()
    is_gradient: bool = False
    is_carried: bool = False
    combined: frozenset[Cause] = frozenset()
    totals: frozenset[Total] = frozenset()


EQUAL = ShareFacts()
UNKNOWN = ShareFacts(Reach.UNKNOWN)
# A reduction over replicas may be any number, such as a count of tokens.
COMBINED = ShareFacts(divisors=frozenset({ANY}))


def as_combined(operand: ShareFacts) -> ShareFacts:
    """Returns the facts about the sum or mean of a value over replicas.

    The mean of gradients gets a warning of its own.
    """
    causes = frozenset() if operand.is_gradient else operand.causes
    return COMBINED._replace(combined=operand.combined | causes)


def keep_totals(equation: Any, operands: list[ShareFacts]) -> frozenset[Total]:
    """Returns the totals that stay in the result, scaled by known numbers at most.

    The quotient of two totals, such as the mean of a cluster, has the right scale.
    """
    name = equation.primitive.name
    found = union(operand.totals for operand in operands)
    if not found or name in LINEAR or name == "select_n":
        return found
    if name == "div" and is_of_mean(equation):
        return frozenset(total._replace(is_mean=True) for total in found)

    is_scaled = name == "mul" or (name == "div" and bool(operands[0].totals))
    has_number = any(read_real(operand) is not None for operand in equation.invars)
    if not is_scaled or not has_number:
        return frozenset()
    divisors = divisors_in(equation)
    return frozenset(
        total._replace(divisors=total.divisors | divisors) for total in found
    )


def bends(equation: Any, operands: list[ShareFacts]) -> bool:
    """Returns whether an operation is nonlinear in values that differ by replica."""
    name = equation.primitive.name
    num_own = sum(operand.reach is not Reach.EQUAL for operand in operands)
    if name in PRODUCTS:
        return num_own > 1
    if name == "div":
        return operands[1].reach is not Reach.EQUAL
    # Optax has `g**order` with an order of 1.
    return name in NONLINEAR and equation.params.get("y") != 1


def divides_by_own(equation: Any, operands: list[ShareFacts]) -> bool:
    """Returns whether an operation divides by a number of the replica's own."""
    name = equation.primitive.name
    is_power = name == "integer_pow" and equation.params["y"] < 0
    is_quotient = name == "div" and operands[1].reach is not Reach.EQUAL
    return is_power or is_quotient


def divisors_in(equation: Any) -> set[int]:
    """Returns the numbers by which an operation divides, rounded."""
    name = equation.primitive.name
    if name not in _SCALES:
        return set()
    found: set[int] = set()
    for number in filter(None, map(read_real, equation.invars)):
        divisor = number if name == "div" else 1 / number
        if math.isfinite(divisor) and abs(divisor) > 1:
            found.add(round(abs(divisor)))
    return found


def weighs_examples(equation: Any, operands: list[ShareFacts]) -> bool:
    """Returns whether an operation gives examples weights that a sum has normalized.

    That is a division by a sum over the share, such as `mask / mask.sum()`, or a
    product with the reciprocal of one, such as the weights of classes by their number.
    """
    name = equation.primitive.name
    statistics = [operand for operand in operands if operand.reach is Reach.REDUCED]
    has_examples = any(operand.reach is Reach.EXAMPLES for operand in operands)
    if not statistics or not has_examples:
        return False

    operations = {cause.operation for operand in statistics for cause in operand.causes}
    if not operations <= set(_RECIPROCALS):
        return False  # The statistics are more than a sum and its reciprocal.
    if name == "div":
        return operands[1].reach is Reach.REDUCED
    has_reciprocal = not operations.isdisjoint(("div", "integer_pow"))
    return has_reciprocal and name in ("mul", "dot_general", "gather")


def uses_gradient(operands: list[ShareFacts]) -> bool:
    """Returns whether examples meet a gradient of the share before its reduction."""
    has_gradient = False
    has_examples = False
    for operand in operands:
        if operand.reach is Reach.REDUCED and operand.is_gradient:
            has_gradient = True
        if operand.reach is Reach.EXAMPLES and not operand.is_gradient:
            has_examples = True
    return has_gradient and has_examples


def is_of_statistics(equation: Any, operands: list[ShareFacts]) -> bool:
    """Returns whether an operation of a backward pass begins at statistics.

    The derivative of a nonlinear function of means is a product with these means. It
    belongs to the loss if the gradient has not passed through examples before.
    Statistics that normalize examples get their gradient from the examples.
    """
    # `select_n` is the derivative of `jnp.maximum`, `jax.nn.relu` and so on.
    if equation.primitive.name not in (*PRODUCTS, "div", "select_n"):
        return False
    has_statistics = False
    for variable, facts in zip(equation.invars, operands, strict=True):
        is_constant = isinstance(variable, core.Literal)
        is_of_loss = facts.reach is Reach.EQUAL and (facts.is_gradient or is_constant)
        if facts.reach is Reach.REDUCED and not facts.is_gradient:
            has_statistics = True
        elif not is_of_loss:
            return False
    return has_statistics


def is_difference(equation: Any, operands: list[ShareFacts]) -> bool:
    """Returns whether an operation subtracts a mean over the share from examples."""
    if equation.primitive.name != "sub":
        return False
    minuend, subtrahend = operands
    return minuend.reach is Reach.EXAMPLES and subtrahend.reach is Reach.REDUCED


def keeps_differences(equation: Any) -> bool:
    """Returns whether differences from a mean stay such, or become their squares."""
    name = equation.primitive.name
    operands = equation.invars
    if name == "mul":
        is_square = operands[0] is operands[1]
        return is_square or any(read_real(operand) is not None for operand in operands)
    is_divided = name == "div" and read_real(operands[1]) is not None
    return is_divided or name in (*_KEEPING, *_SQUARES)


def depends_on_order(equation: Any, operands: list[ShareFacts]) -> bool:
    """Returns whether a result depends on the order of numbers of the examples.

    An order of indices is no cause: it may move examples and move them back.
    """
    value = equation.invars[0].aval
    facts = operands[0]
    is_followed = facts.reach is Reach.EXAMPLES
    if not is_followed or not jnp.issubdtype(value.dtype, jnp.floating):
        return False
    axis = _find_ordered_axis(equation, value.ndim)
    return axis is not None and axis - value.ndim in facts.axes


def _find_ordered_axis(equation: Any, num_axes: int) -> int | None:
    """Returns the axis along which an operation orders or accumulates values."""
    name = equation.primitive.name
    if name in CUMULATIVE:
        return equation.params["axis"]
    if name == "top_k":
        return equation.params.get("axis", num_axes - 1)
    is_of_values = name == "sort" and len(equation.invars) == 1
    return equation.params["dimension"] if is_of_values else None


def as_carried(facts: ShareFacts) -> ShareFacts:
    """Returns the facts about a value that a loop hands from example to example."""
    if facts.reach is Reach.EQUAL:
        return facts
    return facts._replace(is_carried=True)


def as_total(facts: ShareFacts, num_examples: int) -> ShareFacts:
    """Returns the facts about a value that a loop has carried over all examples."""
    is_of_one = facts.reach is Reach.EXAMPLES and not facts.axes
    if not is_of_one:
        return facts
    return facts._replace(reach=Reach.REDUCED, sizes=facts.sizes | {num_examples})


def as_stack(facts: ShareFacts, num_axes: int) -> ShareFacts:
    """Returns the facts about the values that a loop has made for all examples."""
    if facts.reach is not Reach.EXAMPLES:
        return facts
    return facts._replace(axes=facts.axes | {-num_axes})


def leave_loop(facts: ShareFacts, line: str) -> ShareFacts:
    """Returns the facts about a result of a loop over examples."""
    causes: set[Cause] = set()
    for cause in facts.causes:
        is_of_loop = cause.kind is CauseKind.LOOP
        causes.add(cause._replace(line=line) if is_of_loop else cause)
    return facts._replace(causes=frozenset(causes), is_carried=False)


def first_of(causes: Iterable[Cause]) -> Cause:
    """Returns the cause to report: the one that lasts, if there is one.

    A number is clipped by a quotient, so the operation before it says more.
    """
    others = [kind for kind in CauseKind if kind not in LASTING]
    others.remove(CauseKind.QUOTIENT)
    kinds = [*LASTING, *others, CauseKind.QUOTIENT]

    def rank(cause: Cause) -> tuple[int, str, str]:
        return kinds.index(cause.kind), cause.operation, cause.line

    return min(causes, key=rank)
