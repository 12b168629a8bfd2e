"""Writes files that a reader finds whole, or not at all.

Files that attempts of a run append lines to, and nobody ever cuts.

A process that is killed, or a full disk, may leave half a line at the end. Whoever
appends next begins a line of its own, and readers skip the half.

Numbers of an output by path, and values that JSON can hold.

JSON knows no NaN and no infinity, so these are strings: `"NaN"`, `"Infinity"` and
`"-Infinity"`.
"""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath


def append_lines(path: Path, lines: bytes) -> None:
    """Appends whole lines; the file and its directory are made by the first ones."""
    try:
        _append(path, lines)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        _append(path, lines)


def _append(path: Path, lines: bytes) -> None:
    # Opened anew, as it is done rarely, and no file stays open in idle programs.
    with open(path, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                lines = b"\n" + lines
        file.write(lines)


_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# To look at abstract types takes most of the time of a record.
_EXACT = frozenset({bool, int, str, type(None)})


def find_numbers(output: Mapping[Any, Any], path: str = "") -> dict[str, int | float]:
    """Returns the scalars of an output by path; whatever else it holds is left out."""
    found: dict[str, int | float] = {}
    for name, value in output.items():
        if isinstance(value, Mapping):
            found |= find_numbers(value, f"{path}{name}/")
        elif (number := _as_number(value)) is not None:
            found[f"{path}{name}"] = number
    return found


def as_json(value: Any) -> Any:
    """Returns what JSON can hold: what it knows no kind for becomes a string.

    A dataclass becomes a dictionary of its fields.
    """
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
        return {each.name: as_json(getattr(value, each.name)) for each in fields}
    number = _as_number(value)
    if number is None:
        return getattr(value, "__name__", None) or str(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "-Infinity" if number < 0 else "Infinity"


def from_json(value: Any) -> Any:
    """Returns a number that JSON held."""
    return _WORDS.get(value, value) if isinstance(value, str) else value


def flatten(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Returns values as services show them: by path, and a list as a string."""
    return dict(_flatten(as_json(values), ""))


def _flatten(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flatten(item, f"{path}/{name}" if path else name)
    elif isinstance(value, bool | int | float | str):
        yield path, value
    else:
        yield path, str(value)


def _as_number(value: Any) -> int | float | None:
    if type(value) is float:
        return value
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        kind = value.dtype
        if value.shape != () or not (
            jnp.issubdtype(kind, jnp.number) or kind == np.bool_
        ):
            return None
        value = np.asarray(value).item()
    if isinstance(value, bool | Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else None


def write_whole(path: epath.Path, data: bytes | bytearray, temporary: str) -> None:
    """Writes a file that has its name only when all of it is on the disk.

    Until then it has a temporary name, in the same directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / temporary
    try:
        with unfinished.open("wb") as stream:
            stream.write(data)
            stream.flush()
            if "://" not in str(path):
                os.fsync(stream.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
