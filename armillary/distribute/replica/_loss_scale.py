"""Sees, in a traced step, losses whose scale does not fit how gradients are summed.

Gradients of a loss that differs between replicas arrive summed. So a mean over one
replica's share of the batch gives a gradient that is as many times too large as there
are replicas; a loss that is equal on all replicas is not summed, and one that was
divided by their number gives a gradient that is too small. Neither can be proved wrong,
since nothing tells what a user means. Both are said once.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend import core, source_info_util
from jax.extend.core import primitives

from armillary._jaxpr import programs_in, source_line, walk_programs
from armillary._logging import logger
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
_COPIES = ("broadcast_in_dim", "convert_element_type", "pvary")
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
    equations = list(_made_by(jaxpr, loss))
    names = {equation.primitive.name for equation in equations}
    if any(equation.params.get("name") == _SCALED for equation in equations):
        return None
    if not is_varying(loss.invars[0].aval):
        has_reduced = any(
            name.startswith(("psum", "pm", "all_gather")) for name in names
        )
        return None if has_reduced else _EQUAL_MESSAGE
    divisors = list(_divisors(equations))
    is_mean = any(d % share == 0 for d in divisors for share in shares if share > 1)
    is_global = num_replicas in divisors or any(
        d % (share * num_replicas) == 0 for d in divisors for share in shares
    )
    is_reduced = any(name.startswith("psum") for name in names)
    return _MEAN_MESSAGE if is_mean and not (is_global or is_reduced) else None


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


def _divisors(equations: list[Any]) -> Iterator[int]:
    """Yields the whole numbers that some equations divide by."""
    numbers: dict[Any, float] = {}

    def read(atom: Any) -> float | None:
        if not isinstance(atom, core.Literal):
            return numbers.get(atom)
        return float(np.asarray(atom.val)) if np.size(atom.val) == 1 else None

    for equation in equations:
        if equation.primitive.name in _COPIES:
            number = read(equation.invars[0])
            if number is not None:
                numbers[equation.outvars[0]] = number
    for equation in equations:
        operands = list(map(read, equation.invars))
        candidates = {
            "div": operands[-1:],
            "mul": [1 / number for number in operands if number],
        }
        for value in candidates.get(equation.primitive.name, ()):
            if value and value >= 1 and abs(value - round(value)) < 1e-4 * value:
                yield round(value)
