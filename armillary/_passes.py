"""Tells a forward pass from a backward pass, by the words in JAX's name stacks.

An example is `transpose(jvp(checkpoint))/rematted_computation/vmap(block)`:
`jax.checkpoint` computes a forward pass again within a backward pass.
"""

import enum
import functools
from typing import Any

_TRANSPOSED = "transpose("
_REPEATED = "rematted_computation"
_DIFFERENTIATED = "jvp("


class Pass(enum.Enum):
    """The part of differentiation that an operation belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


def find_pass(equation: Any) -> Pass | None:
    """Returns the pass that an equation is in; `None` if its name stack is silent."""
    return _find_pass(str(equation.source_info.name_stack))


@functools.lru_cache(maxsize=4096)
def _find_pass(stack: str) -> Pass | None:
    found: Pass | None = None
    depth = 0
    for part in stack.split("/"):
        is_outside = depth == 0
        depth += part.count("(") - part.count(")")
        if _TRANSPOSED in part:
            found = Pass.BACKWARD
        elif is_outside and _REPEATED in part:
            found = Pass.FORWARD
    return found


def is_differentiated(equation: Any) -> bool:
    """Returns whether a name stack says that JAX differentiates an equation."""
    stack = str(equation.source_info.name_stack)
    return _DIFFERENTIATED in stack or _TRANSPOSED in stack


def is_repeated(equation: Any) -> bool:
    """Returns whether `jax.checkpoint` repeats an equation in a backward pass."""
    return _REPEATED in str(equation.source_info.name_stack)
