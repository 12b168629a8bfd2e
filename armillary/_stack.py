"""Room for the frames of deep calls.

CPython keeps the frames of functions in pieces of 16 KB. Where one ends, each call maps
another from the system, and its return gives it back: 9 us on the machine where a call
takes 0.05. A loop that makes its calls from there is slow by chance, and another depth
of the caller's code moves it: JAX lowered a program of 10,000 equations in 0.45 s in
place of 0.14 s.
"""

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SLOTS = 8192
"""A frame that needs so many gets a piece of 128 KB, whose other half is free."""


def with_room(function: _Function) -> _Function:
    """Has a function, and what it calls, keep their frames in one large piece."""
    changed: Any = function
    changed.__code__ = changed.__code__.replace(co_stacksize=_SLOTS)
    return function
