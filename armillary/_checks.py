"""Checks of arguments, with the same sentences everywhere; lists for messages."""

import inspect
import math
import os
import types
from collections.abc import Callable, Collection, Iterable
from numbers import Integral, Real
from typing import Any, NoReturn, get_args

from armillary._shorten import shorten

# Classes whose own name is not the name that programs write.
_NAMES = {"P": "PartitionSpec"}


def _refuse_kind(name: str, value: Any, rule: str) -> NoReturn:
    kind = type(value).__name__
    shown = shorten(value)
    raise TypeError(f"`{name}` is {shown} of type {kind}, but it must be {rule}")


def _refuse(name: str, value: Any, rule: str) -> NoReturn:
    raise ValueError(f"`{name}` is {shorten(value)}, but it must be {rule}")


def is_positive_int(value: Any) -> bool:
    """Returns whether `value` is an integer of at least 1."""
    return _is_int(value) and value >= 1


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def check_positive_int(
    name: str, value: Any, most: int | None = None, fix: str = ""
) -> int:
    """Returns `value` as an `int`, or raises if it is not positive, or above `most`."""
    is_too_large = most is not None and is_positive_int(value) and value > most
    if is_too_large or not is_positive_int(value):
        limit = "" if most is None else f" of at most {most:,}"
        usual = f"Use `{name}=1` or more{_as_int(name, value)}."
        _refuse(name, value, f"a positive integer{limit}. {usual} {fix}".rstrip())
    return int(value)


def check_not_negative_int(name: str, value: Any, most: int | None = None) -> int:
    """Returns `value` as an `int`, or raises if it is below 0, or above `most`."""
    is_fine = _is_int(value) and value >= 0
    if not is_fine or (most is not None and value > most):
        limit = "" if most is None else f" and at most {most:,}"
        rule = f"an integer that is not negative{limit}. Use `{name}=0` or more."
        _refuse(name, value, rule)
    return int(value)


def check_num_steps(name: str, value: Any) -> int:
    """Returns `value` as an `int`, or raises if it is not a number of steps."""
    if not is_positive_int(value) and not (_is_int(value) and value == -1):
        fix = f"Use `{name}=1` or more, or `{name}=-1`{_as_int(name, value)}."
        rule = f"a positive integer, or -1 to run until the data ends. {fix}"
        _refuse(name, value, rule)
    return int(value)


def _as_int(name: str, value: Any) -> str:
    """Returns the advice for a number that is in an array."""
    is_array = getattr(value, "shape", None) == () and not isinstance(value, Integral)
    return f"; `{name}=int(...)` takes the value out of an array" if is_array else ""


def check_not_negative(name: str, value: Any) -> float:
    """Returns `value`, or raises if it is not a number of at least 0."""
    if not _is_real(value) or value < 0:
        rule = f"a finite number that is not negative. Use `{name}=0` or more."
        _refuse(name, value, rule)
    return float(value)


def check_positive(name: str, value: Any, fix: str) -> float:
    """Returns `value`, or raises if it is not a positive, finite number."""
    if not _is_real(value) or value <= 0:
        _refuse(name, value, f"a positive, finite number. {fix}")
    return float(value)


def check_seconds(name: str, value: Any, fix: str) -> float:
    """Returns `value`, or raises if it is not a positive, finite time."""
    if not _is_real(value) or value <= 0:
        _refuse(name, value, f"a positive number of seconds. {fix}")
    return float(value)


def check_one_of(
    name: str, value: Any, allowed: Collection[Any], fix: str = "Use one of these."
) -> None:
    """Raises if `value` is not one of the `allowed` values; `fix` is the advice."""
    # Not `in`, because 1 equals True, and `==` of an array is not a bool.
    if not any(_is_kind(value, type(each)) and value == each for each in allowed):
        _refuse(name, value, f"one of {', '.join(map(repr, allowed))}. {fix}")


def _is_kind(value: Any, kind: type) -> bool:
    # By name as well, to allow NumPy's own True and False.
    return isinstance(value, kind) or type(value).__name__ == kind.__name__


def check_instance(
    name: str, value: Any, kind: type | types.UnionType, fix: str
) -> None:
    """Raises if `value` is not an instance of `kind`; `fix` is the advice."""
    if not isinstance(value, kind):
        every: tuple[Any, ...] = get_args(kind) or (kind,)
        shown = " or ".join(f"`{_name_of(each)}`" for each in every)
        _refuse_kind(name, value, f"a {shown}. {fix}")


def _name_of(kind: Any) -> str:
    """Returns the name that programs write for a class."""
    own: str = kind.__name__
    return _NAMES.get(own, own.removesuffix("Type"))


def check_path(name: str, value: Any, *, only_python_opens: bool = False) -> str:
    """Returns an absolute path as a string, with the home folder for a leading `~`.

    So a path stays valid if the program changes its working directory. Addresses with a
    scheme, such as `gs://`, are not changed. Python can open a file with any bytes in
    its name, but other libraries need UTF-8.
    """
    if not isinstance(value, str | os.PathLike):
        _refuse_kind(name, value, "a path. Use a string or a `pathlib.Path`.")
    text = os.fspath(value)
    if not text.strip() or "\0" in text:
        fix = f'Use `{name}="."` for the working directory.'
        _refuse(name, text, f"a path that is not empty and has no NUL. {fix}")
    if "://" in text:
        return text

    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        fix = f'Write the whole path, or `{name}="./{text}"` for a name with a tilde.'
        _refuse(name, text, f"a path whose home folder this machine knows. {fix}")
    path = os.path.abspath(expanded)
    if not (only_python_opens or _is_utf8_on_disk(path)):
        raise ValueError(
            f"`{name}` is {path!a}, but it must be a path whose name on the disk "
            f"is UTF-8. {_say_how_to_encode(path, 'rename the folder')}"
        )
    return path


def _is_utf8_on_disk(path: str) -> bool:
    try:
        return os.fsencode(path) == path.encode()
    except UnicodeEncodeError:
        return False


def check_encodable(what: str, text: str, otherwise: str) -> None:
    """Raises if UTF-8 cannot encode a text; `what` begins the message.

    Python makes such text from bytes that are not text in the locale's encoding, for
    example, in an environment variable. `otherwise` says what to do if these bytes are
    not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{what} {text!a}, but it must be text that UTF-8 can encode. "
            f"{_say_how_to_encode(text, otherwise)}"
        ) from None


def _say_how_to_encode(text: str, otherwise: str) -> str:
    try:
        # Bytes that Python could not decode when the program started are surrogates in
        # the text. This returns the bytes.
        text.encode(errors="surrogateescape").decode()
    except UnicodeError:
        return f"Its bytes are not UTF-8: {otherwise}."
    return (
        "Python does not expect UTF-8 with this locale: set the variable "
        "`LC_ALL=C.UTF-8` or `PYTHONUTF8=1` for the program."
    )


def check_callable(name: str, value: Any) -> None:
    """Raises if `value` cannot be called."""
    if not callable(value):
        _refuse_kind(name, value, "callable. Pass a function or a method.")


def check_takes(name: str, value: Any, *arguments: str) -> None:
    """Raises if `value` cannot be called with arguments of these names, in order."""
    check_callable(name, value)
    misfit = find_misfit(value, len(arguments))
    if misfit is not None:
        listed = " and ".join(f"`{argument}`" for argument in arguments)
        how = f"with {listed}" if arguments else "without arguments"
        raise TypeError(
            f"`{name}` is `{misfit}`, but it is called {how}. Write "
            f"`def fn({', '.join(arguments)}):`."
        )


def find_misfit(function: Callable[..., Any], count: int) -> str | None:
    """Returns a function with its signature, if it does not take `count` arguments.

    Returns `None` if it does, or if its signature is not known.
    """
    try:
        # A decorator may change the arguments of the function that it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # Some built-in functions have no signature.
        return None
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return f"{getattr(function, '__name__', type(function).__name__)}{signature}"
    return None


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
            f"`{name}` is {shorten(value)} of type {type(value).__name__}, but it must "
            f"have {listed}, which it lacks. {fix}"
        )


def list_lines(lines: Iterable[str], most: int = 20) -> str:
    """Returns lines for a message, indented; after the first `most`, their number."""
    shown = [f"  {line}" for line in lines]
    if len(shown) > most:
        shown[most:] = [f"  ... and {len(shown) - most} more"]
    return "\n".join(shown)


def printable(text: str) -> str:
    """Returns a text with control characters as escapes, so that terminals are safe."""
    shown = (c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
    return "".join(shown)


def counted(number: int, noun: str) -> str:
    """Returns a number with a noun, such as `1 step` and `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
