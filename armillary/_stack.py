"""Memory for the frames of deep calls.

CPython keeps the frames of functions in blocks of 16 KB. At the end of a block, each
call maps a new block, and its return unmaps it. That takes 9 us, on a machine where a
call takes 0.05 us. A loop that calls functions from such a place is slow by chance, and
a different depth of the caller's code moves the place. For example, JAX lowered a
program of 10,000 equations in 0.45 s instead of 0.14 s.
"""

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SLOTS = 8192
"""A frame with this many slots gets a block of 128 KB, and half of it is free."""


def with_room(function: _Function) -> _Function:
    """Keeps the frames of a function, and of its calls, in one large block."""
    changed: Any = function
    changed.__code__ = changed.__code__.replace(co_stacksize=_SLOTS)
    return function
