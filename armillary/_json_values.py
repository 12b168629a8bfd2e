"""Numbers of an output, and values of JSON.

JSON has no NaN and no infinity, so these are strings: `"NaN"`, `"Infinity"` and
`"-Infinity"`.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from armillary._checks import check_encodable

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# These types are checked first, because checks of abstract types are slow.
_EXACT = frozenset({bool, int, str, type(None)})


def find_numbers(output: Mapping[Any, Any], path: str = "") -> dict[str, int | float]:
    """Returns the scalars of an output by path; other values are left out."""
    found: dict[str, int | float] = {}
    for name, value in output.items():
        if isinstance(value, Mapping):
            found |= find_numbers(value, f"{path}{name}/")
            continue
        number = _as_number(value)
        if number is not None:
            found[f"{path}{name}"] = number
    return found


def _as_number(value: Any) -> int | float | None:
    if type(value) is float:
        return value
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        dtype = value.dtype
        is_number = jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_
        if value.shape or not is_number:
            return None
        value = np.asarray(value).item()
    if isinstance(value, bool | Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else None


def as_json(value: Any) -> Any:
    """Returns a value in types of JSON: unknown types as strings."""
    kind = type(value)
    if kind in _EXACT or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, str):
        return value
    if dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(value)
        return {field.name: as_json(getattr(value, field.name)) for field in fields}
    number = _as_number(value)
    if number is None:
        return getattr(value, "__name__", None) or str(value)
    if math.isfinite(number):
        return number
    if math.isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


def from_json(value: Any) -> Any:
    """Returns a number from a value in JSON."""
    return _WORDS.get(value, value) if isinstance(value, str) else value


def flatten(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Returns values by path, with lists as strings, as services show them.

    Raises:
        ValueError: If two values have one path, or UTF-8 cannot encode a text.
    """
    found: dict[str, bool | int | float | str] = {}
    for path, value in _flatten(as_json(values), ""):
        for text in (path, value):
            if isinstance(text, str):
                what = "`hyperparameters` has the text"
                check_encodable(what, text, "give it another text")
        if path in found:
            raise ValueError(
                f"`hyperparameters` has two values that are both called {path!r}. "
                "Rename one of them."
            )
        found[path] = value
    return found


def _flatten(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            inner = f"{path}/{name}" if path else name
            yield from _flatten(item, inner)
        return
    is_plain = isinstance(value, int | float | str)
    yield path, value if is_plain else str(value)
