"""Sees, in a traced step, losses whose scale does not fit how gradients are summed.

Gradients of a loss that differs between replicas arrive summed. So a mean over one
replica's share of the batch gives a gradient that is as many times too large as there
are replicas; a loss that is equal on all replicas is not summed, and one that was
divided by their number gives a gradient that is too small. Neither can be proved wrong,
since nothing tells what a user means. Both are said once.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend import core, source_info_util
from jax.extend.core import primitives

from armillary._jaxpr import (
    called_program,
    programs_in,
    source_line,
    walk_programs,
)
from armillary._logging import logger
from armillary.distribute.replica._differences import REDUCTIONS
from armillary.distribute.replica._retype import AXIS_NAME, is_varying

# Messages name the line of the user's operation, not ours.
source_info_util.register_exclusion(__file__)

_LOSS = "armillary loss"
_SCALED = "armillary scaled loss"
_MEAN_MESSAGE = (
    "The loss that is differentiated at %s is a mean over one replica's share of the "
    "batch, and its gradient is the sum over %d replicas: %d times that of one replica "
    "with the whole batch. Use `armillary.compute_average_loss(losses)`, or divide by "
    "`strategy.num_replicas_in_sync`."
)
_EQUAL_MESSAGE = (
    "The loss that is differentiated at %s holds no data and is equal on all %d "
    "replicas, so its gradient is that of one replica, and not summed. If you have "
    "divided the loss by the number of replicas, or by the global batch, the gradient "
    "is too small: use `armillary.scale_regularization_loss` or "
    "`armillary.compute_average_loss`, which is right either way."
)
# What leaves a number the number it was.
_COPIES = ("broadcast_in_dim", "convert_element_type", "copy", "pvary", "reshape")
# What scales its result as its operands are scaled.
_LINEAR = (
    *_COPIES,
    "add",
    "concatenate",
    "name",
    "neg",
    "select_n",
    "slice",
    "squeeze",
    "sub",
    "transpose",
)
_said: set[str] = set()


def mark_loss(loss: Any) -> None:
    """Marks a value as a loss that is differentiated, for `warn_of_scale`."""
    primitives.name_p.bind(loss, name=_LOSS)


def mark_scaled(loss: Any) -> Any:
    """Marks a value as a loss that the library has scaled."""
    return primitives.name_p.bind(loss, name=_SCALED)


def warn_of_scale(program: core.ClosedJaxpr) -> None:
    """Logs a warning, once, for each loss in a traced step with a doubtful scale."""
    for jaxpr, _ in walk_programs(program):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "shard_map":
                _look_into(equation)


def _look_into(equation: Any) -> None:
    num_replicas = dict(equation.params["mesh"].shape).get(AXIS_NAME, 1)
    specs = equation.params["in_specs"]
    shares = {
        atom.aval.shape[1]
        for atom, spec in zip(equation.invars, specs, strict=True)
        if AXIS_NAME in str(spec) and len(atom.aval.shape) > 1
    }
    if num_replicas == 1 or not shares:
        return
    for jaxpr, _ in walk_programs(equation.params["jaxpr"]):
        for loss in jaxpr.eqns:
            if loss.primitive.name != "name" or loss.params["name"] != _LOSS:
                continue
            where = source_line(loss)
            message = _judge(jaxpr, loss, shares, num_replicas)
            if message is not None and where not in _said:
                _said.add(where)
                counts = (num_replicas,) * (message.count("%d"))
                logger.warning(message, where, *counts)


def _judge(jaxpr: Any, loss: Any, shares: set[int], num_replicas: int) -> str | None:
    """Returns what to say of a loss, if anything."""
    if not is_varying(loss.invars[0].aval):
        is_chosen = any(
            equation.primitive.name.startswith(REDUCTIONS)
            or equation.params.get("name") == _SCALED
            for equation in _made_by(jaxpr, loss)
        )
        return None if is_chosen else _EQUAL_MESSAGE
    scales = {scale for _, scale in _scales(jaxpr, loss.invars[0], (1.0, 1))}
    is_mean = any(_is_mean(*scale, shares - {1}, num_replicas) for scale in scales)
    return _MEAN_MESSAGE if is_mean else None


def _is_mean(divisor: float, count: int, shares: set[int], num_replicas: int) -> bool:
    """Returns whether a sum of `count` numbers was divided as one replica's mean is."""
    whole = round(divisor) if math.isfinite(divisor) else 0
    is_whole = abs(divisor - whole) < 1e-4 * divisor
    if not is_whole or all(whole % share for share in shares):
        return False
    totals = [share * num_replicas for share in shares]
    # With as many entries an example as there are replicas, nobody can tell.
    is_of_all = whole == count and count not in totals
    return is_of_all or all(whole % total for total in totals)


def _made_by(jaxpr: Any, last: Any) -> Iterator[Any]:
    """Yields the equations that lead to one, with all that is nested in them."""
    needed = set(_variables(last))
    for equation in reversed(jaxpr.eqns):
        if needed.isdisjoint(equation.outvars):
            continue
        needed.update(_variables(equation))
        yield equation
        for program in programs_in(equation):
            for inner, _ in walk_programs(program):
                yield from inner.eqns


def _variables(equation: Any) -> list[Any]:
    return [atom for atom in equation.invars if not isinstance(atom, core.Literal)]


def _scales(
    jaxpr: Any, value: Any, scale: tuple[float, int]
) -> Iterator[tuple[Any, tuple[float, int]]]:
    """Follows a value back through sums and divisions, on every way that data takes.

    Yields where each way ends, with what the value was divided by up to there and how
    many numbers were summed for one. What is summed over replicas is left out, and so
    is what the library has scaled.
    """
    makers = {made: each for each in jaxpr.eqns for made in each.outvars}
    pending, seen = [(value, scale)], set()
    while pending:
        atom, (divisor, count) = pending.pop()
        if not is_varying(atom.aval) or (atom, divisor, count) in seen:
            continue
        seen.add((atom, divisor, count))
        equation = makers.get(atom)
        if equation is None:
            yield atom, (divisor, count)
            continue
        name, operands = equation.primitive.name, equation.invars
        if name.startswith(REDUCTIONS) or equation.params.get("name") == _SCALED:
            continue
        if name == "reduce_sum":
            shape = operands[0].aval.shape
            count *= math.prod(shape[axis] for axis in equation.params["axes"])
        elif name == "div":
            number = _read(operands[1], makers)
            if not number:  # by what was counted, perhaps on all replicas
                continue
            divisor *= abs(number)
        elif name == "mul" and operands[0] is not operands[1]:
            for operand in operands:
                divisor /= abs(_read(operand, makers) or 1)
        elif called := called_program(equation):
            inner = getattr(called, "jaxpr", called)
            result = inner.outvars[equation.outvars.index(atom)]
            for end, reached in _scales(inner, result, (divisor, count)):
                if end in inner.invars:
                    pending.append((operands[inner.invars.index(end)], reached))
                else:
                    yield end, reached
            continue
        elif name not in _LINEAR:
            yield atom, (divisor, count)
            continue
        pending += [(operand, (divisor, count)) for operand in operands]


def _read(atom: Any, makers: dict[Any, Any]) -> float | None:
    """Returns the number that a constant is everywhere."""
    while not isinstance(atom, core.Literal):
        maker = makers.get(atom)
        if maker is None or maker.primitive.name not in _COPIES:
            return None
        atom = maker.invars[0]
    return float(np.asarray(atom.val)) if np.size(atom.val) == 1 else None
