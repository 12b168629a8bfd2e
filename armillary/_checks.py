"""One function for each kind of argument check, so each sentence is written once.

And those for lists and numbers in messages.
"""

import math
from collections.abc import Callable, Collection, Iterable
from numbers import Integral, Real
from typing import Any, TypeVar

from armillary._traceback import hides_frames

_C = TypeVar("_C", bound=Callable[..., Any])


def is_positive_int(value: Any) -> bool:
    """Returns whether `value` is an integer of at least 1."""
    return _is_int(value) and value >= 1


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_positive_int(name: str, value: Any) -> int:
    """Returns `value` as an `int`, or raises if it is not a positive integer."""
    if not is_positive_int(value):
        raise ValueError(
            f"`{name}` is {value!r}, but it must be a positive integer. "
            f"Use `{name}=1` or more{_as_int(name, value)}."
        )
    return int(value)


def _as_int(name: str, value: Any) -> str:
    """Returns how to go on with a number that came out of an array."""
    is_array = getattr(value, "shape", None) == () and not isinstance(value, Integral)
    return f"; `{name}=int(...)` takes the value out of an array" if is_array else ""


def check_not_negative(name: str, value: Any) -> float:
    """Returns `value`, or raises if it is not a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or value < 0:
        raise ValueError(
            f"`{name}` is {value!r}, but it must be a number that is not negative. "
            f"Use `{name}=0` or more."
        )
    return float(value)


def check_seconds(name: str, value: Any, fix: str) -> float:
    """Returns `value`, or raises if it is not a time that can pass."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 < float(value) < math.inf:
        raise ValueError(
            f"`{name}` is {value!r}, but it must be a positive number of seconds. {fix}"
        )
    return float(value)


def check_one_of(
    name: str, value: Any, allowed: Collection[Any], fix: str = "Use one of these."
) -> None:
    """Raises if `value` is not one of the `allowed` values; `fix` says what to do."""
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(
            f"`{name}` is {value!r}, but it must be one of {choices}. {fix}"
        )


def check_instance(name: str, value: Any, kind: type, fix: str) -> None:
    """Raises if `value` is not an instance of `kind`; `fix` says what to pass."""
    if not isinstance(value, kind):
        raise TypeError(
            f"`{name}` is {value!r} of type {type(value).__name__}, but it must be a "
            f"`{kind.__name__}`. {fix}"
        )


def check_callable(name: str, value: Any) -> None:
    """Raises if `value` cannot be called."""
    if not callable(value):
        raise TypeError(
            f"`{name}` is {value!r} of type {type(value).__name__}, but it must be "
            "callable. Pass a function or a method."
        )


def check_num_steps(name: str, value: Any) -> int:
    """Returns `value` as an `int`, or raises if it is not a number of steps."""
    if not is_positive_int(value) and not (_is_int(value) and value == -1):
        raise ValueError(
            f"`{name}` is {value!r}, but it must be a positive integer, or -1 to run "
            f"until the data ends. Use `{name}=1` or more, or `{name}=-1`"
            f"{_as_int(name, value)}."
        )
    return int(value)


def check_methods(name: str, value: Any, methods: Collection[str], fix: str) -> None:
    """Raises if `value` is not an object with all of `methods`."""
    if isinstance(value, type):
        raise TypeError(
            f"`{name}` is the class {value.__name__}, but it must be an instance. "
            f"Use `{name}={value.__name__}(...)`."
        )
    missing = [method for method in methods if not hasattr(value, method)]
    if missing:
        listed = ", ".join(f"`{method}`" for method in missing)
        raise TypeError(
            f"`{name}` is {value!r} of type {type(value).__name__}, but it must have "
            f"{listed}, which it lacks. {fix}"
        )


def check_not_negative_int(name: str, value: Any) -> int:
    """Returns `value` as an `int`, or raises if it is not an integer of at least 0."""
    if not _is_int(value) or value < 0:
        raise ValueError(
            f"`{name}` is {value!r}, but it must be an integer that is not negative. "
            f"Use `{name}=0` or more."
        )
    return int(value)


def list_lines(lines: Iterable[str], most: int = 20) -> str:
    """Returns lines for a message, indented; after the first `most`, their number."""
    shown = [f"  {line}" for line in lines]
    if len(shown) > most:
        shown[most:] = [f"  ... and {len(shown) - most} more"]
    return "\n".join(shown)


def counted(number: int, noun: str) -> str:
    """Returns a number with what it counts, such as `1 step` and `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def answers_old_names(**answers: str) -> Callable[[_C], _C]:
    """Returns a decorator of classes and methods: it answers keywords they have not."""

    def decorate(target: Any) -> Any:
        if not isinstance(target, type):
            return hides_frames(target, answers)
        target.__init__ = hides_frames(target.__init__, answers)
        return target

    return decorate
