"""Finds reductions of JAX that count replicas without examples.

A short last batch may leave some replicas without examples. These replicas run the
step, too, so `jax.lax.pmean` averages their results as well. `armillary.all_reduce` and
the state leave these replicas out.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend import core

from armillary._jaxpr import (
    is_called_by_library,
    named_axes,
    source_line,
    walk_equations,
)
from armillary.distribute.analysis._operations import REDUCTIONS


class IdleReplicas(NamedTuple):
    """A reduction that counts replicas without examples, and its line."""

    name: str
    line: str


def find_idle_replicas(
    program: core.ClosedJaxpr, axis_name: str
) -> Iterator[IdleReplicas]:
    """Yields the reductions over all replicas that the user's code calls in JAX.

    Args:
        program: The program of a step on one replica.
        axis_name: The axis of replicas.
    """
    for equation in walk_equations(program):
        if _is_reduction_of_user(equation, axis_name):
            yield IdleReplicas(equation.primitive.name, source_line(equation))


def _is_reduction_of_user(equation: Any, axis_name: str) -> bool:
    is_reduction = equation.primitive.name.startswith(REDUCTIONS)
    if not is_reduction or axis_name not in named_axes(equation):
        return False
    return not is_called_by_library(equation)
