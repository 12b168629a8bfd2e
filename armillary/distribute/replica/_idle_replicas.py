"""Finds reductions of JAX that count replicas without examples.

A short last batch may leave some replicas without examples. They run the step, too, so
`jax.lax.pmean` in it averages their results as well. `armillary.all_reduce` and the
state of the library leave these replicas out.
"""

from typing import Any

from jax.extend import core

from armillary._jaxpr import (
    is_called_by_library,
    named_axes,
    source_line,
    walk_equations,
)
from armillary._logging import logger
from armillary.distribute.replica._proof import REDUCTIONS

_WARNED: set[str] = set()


def warn_of_idle_replicas(
    program: core.ClosedJaxpr, axis_name: str, num_active: int, num_replicas: int
) -> None:
    """Warns, once for each line, of reductions that count replicas without examples.

    Args:
        program: The program of a step on one replica.
        axis_name: The axis of replicas.
        num_active: The number of replicas with examples of this batch.
        num_replicas: The number of replicas that run the step.
    """
    if num_active == num_replicas:
        return
    for equation in walk_equations(program):
        if not _is_reduction_of_user(equation, axis_name):
            continue
        line = source_line(equation)
        if line in _WARNED:
            continue
        _WARNED.add(line)
        logger.warning(
            f"`{equation.primitive.name}` at {line} reduces over all {num_replicas} "
            f"replicas, but only {num_active} have examples of this batch, so the "
            "result counts replicas without examples and is wrong. Write "
            '`armillary.all_reduce("mean", value)`, or `"sum"`, which leaves them out.'
        )


def _is_reduction_of_user(equation: Any, axis_name: str) -> bool:
    is_reduction = equation.primitive.name.startswith(REDUCTIONS)
    if not is_reduction or axis_name not in named_axes(equation):
        return False
    return not is_called_by_library(equation)
