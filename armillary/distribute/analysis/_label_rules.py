"""The rules for labels: which operations keep them, and which reductions they forbid.

`_proof` follows the labels through the program of a step by these rules.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.dtypes import issubdtype, prng_key

from armillary.distribute.analysis._labels import Facts, Label, LabelKind, join_facts
from armillary.distribute.analysis._operations import (
    ADDITIONS,
    COPIES,
    CURVED,
    PRODUCTS,
)

_PARTS = (*COPIES, "slice", "dynamic_slice", "gather")

_DIVISIONS = {
    LabelKind.DIVISOR: LabelKind.DIVIDED,
    LabelKind.WEIGHT: LabelKind.WEIGHED,
}
SCALES = tuple(_DIVISIONS.values())
"""The labels of values that were divided by a marked number."""


def wrong_in_sum(operand: Facts) -> list[LabelKind]:
    """Returns the labels with which a sum over replicas would be wrong."""
    return [
        *_reduced_before(operand),
        LabelKind.WEIGHED,
        LabelKind.AVERAGED,
        LabelKind.NOISED,
    ]


def wrong_in_mean(operand: Facts) -> list[LabelKind]:
    """Returns the labels with which a mean over replicas would be wrong."""
    # A mean of gradients of a reduced loss is the sum of their parts, and a mean of
    # reduced values changes nothing. Both are correct.
    is_right = any(map(operand.find, _reduced_before(operand)))
    return [] if is_right else [LabelKind.DIVIDED]


def _reduced_before(operand: Facts) -> list[LabelKind]:
    if operand.reasons:
        return [LabelKind.OF_REDUCED]
    return [LabelKind.OF_REDUCED, LabelKind.REDUCED]


def divide(
    labels: frozenset[Label], dividend: Facts, divisor: Facts
) -> frozenset[Label]:
    """Returns the labels of a quotient, which depend on the mark of the divisor."""
    for mark_kind, kind in _DIVISIONS.items():
        origin = divisor.find(mark_kind)
        if origin:
            labels = dividend.labels | {Label(kind, origin)}
    return labels


def follow_keys(name: str, joined: Facts) -> set[Label]:
    """Returns the labels of random keys that change their form."""
    if name == "random_wrap":
        raw_keys = joined.only(LabelKind.RAW_KEY)
        return {label._replace(kind=LabelKind.KEY) for label in raw_keys}
    if name == "random_unwrap" and not joined.reasons:
        keys = joined.only(LabelKind.KEY)
        return {label._replace(kind=LabelKind.RAW_KEY) for label in keys}
    return set()


def goes_through(label: Label, name: str, dtype: Any, reasons: frozenset[str]) -> bool:
    """Returns whether a value that was made by an operation keeps a label."""
    kind = label.kind
    if kind in _DIVISIONS:
        return name in COPIES
    if kind is LabelKind.RAW_KEY:
        return name in _PARTS
    if kind is LabelKind.KEY:
        return not reasons and issubdtype(dtype, prng_key)
    if kind is LabelKind.GRADIENT:
        return bool(reasons)
    if kind is LabelKind.DRAWN:
        return True
    if not jnp.issubdtype(dtype, jnp.inexact) or name in CURVED:
        return False
    return kind is not LabelKind.REDUCED or not reasons


def keeps_scale(name: str) -> bool:
    """Returns whether an operation in a forward pass keeps the scale of a gradient."""
    return name in (*COPIES, *ADDITIONS, "neg")


def find_lost(
    name: str,
    operands: Sequence[Facts],
    *,
    is_backward: bool,
    is_report: bool,
) -> set[Label]:
    """Returns the labels that do not survive this addition or multiplication.

    Args:
        name: The operation.
        operands: The facts of its operands.
        is_backward: Whether it is in a backward pass.
        is_report: Whether it multiplies a scalar by the number of replicas.
    """
    joined = join_facts(operands)
    own = [operand for operand in operands if operand.reasons]
    lost: set[Label] = set()
    if own and not is_backward:
        # A product of an equal gradient and a differing value is not a gradient:
        # for example, the slope in a line search.
        lost |= joined.only(LabelKind.OF_REDUCED) - join_facts(own).labels
    if not all(operand.find(LabelKind.DRAWN) for operand in own):
        lost |= joined.only(LabelKind.DRAWN)

    if name in ADDITIONS:
        # Equal operands do not count, such as the zeros that a sum begins with.
        kinds = (LabelKind.OF_REDUCED, LabelKind.DIVIDED)
        is_all = all(operand.only(*kinds) for operand in own)
        return lost if is_all else joined.only(LabelKind.OF_REDUCED)

    is_product = name in PRODUCTS
    divided = [operand for operand in operands if operand.find(LabelKind.DIVIDED)]
    is_by_divisor = name == "div" and operands[1].find(LabelKind.DIVISOR)
    was_reduced_first = all(operand.find(LabelKind.REDUCED) for operand in divided)
    if is_by_divisor or not was_reduced_first:
        lost |= joined.only(LabelKind.REDUCED)  # divided after it was reduced

    is_square = is_product and len(divided) == len(operands)
    if (is_report or is_square) and not is_backward:
        lost |= joined.only(LabelKind.DIVIDED)
    if is_product and all(operand.find(LabelKind.NOISED) for operand in operands):
        lost |= joined.only(LabelKind.NOISED)
    return lost
