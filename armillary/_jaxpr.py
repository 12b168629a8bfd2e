"""Walks a traced program and the programs nested in it."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core


def walk_programs(program: core.ClosedJaxpr) -> Iterator[tuple[Any, list[Any]]]:
    """Yields the equations' owner (a `Jaxpr`) and the constants of each program.

    The program itself comes first, then the bodies of its loops, branches, calls and
    maps, at any depth.
    """
    pending: list[Any] = [program]
    while pending:
        current = pending.pop()
        jaxpr = getattr(current, "jaxpr", current)
        yield jaxpr, list(getattr(current, "consts", ()))
        for equation in jaxpr.eqns:
            for parameter in equation.params.values():
                leaves = jax.tree.leaves(parameter, is_leaf=_is_program)
                pending.extend(leaf for leaf in leaves if _is_program(leaf))


def _is_program(value: Any) -> bool:
    return isinstance(value, core.ClosedJaxpr | core.Jaxpr)
