"""Writes and reads files: numbers of an output, JSON values, lines, whole files.

JSON has no NaN and no infinity, so these are strings: `"NaN"`, `"Infinity"` and
`"-Infinity"`. Attempts of a run append lines of JSON to one file, which is never cut. A
process that is killed, or a full disk, may leave an incomplete last line. The next
writer then begins a new line, and readers skip the incomplete line.
"""

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from armillary._checks import check_encodable
from armillary._logging import logger
from armillary._process import is_first

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# These types are checked first, because checks of abstract types are slow.
_EXACT = frozenset({bool, int, str, type(None)})
_LEAST_SECONDS = 1e-6  # the smallest difference of two times since the epoch


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
        return {each.name: as_json(getattr(value, each.name)) for each in fields}
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


class RisingClock:
    """Seconds since the epoch that always rise, even if a machine's clock is set back.

    After that, the time continues from the last value, at the real speed. So values of
    one clock can be compared. `start_after` continues the clock of an earlier process.
    """

    def __init__(self) -> None:
        self._last = -math.inf
        self._read_at = 0.0

    def start_after(self, seconds: float) -> None:
        """Makes all further values larger than a value of an earlier clock."""
        if seconds > self._last:
            self._last = seconds
            self._read_at = time.monotonic()

    def now(self) -> float:
        """Returns the time, above every earlier value."""
        now = time.monotonic()
        passed = max(now - self._read_at, _LEAST_SECONDS)
        self._last = max(time.time(), self._last + passed)
        self._read_at = now
        return self._last


class LinesFile:
    """A local file to which the first process of a job appends lines.

    A failure is logged once, and ends the recording, but not the training. `what` names
    the records in the log message.
    """

    def __init__(self, path: Path | None, what: str) -> None:
        self._path = path
        self._what = what

    @property
    def is_on(self) -> bool:
        """True if lines of this process are written."""
        return self._path is not None and is_first()

    def read_end(self, num_bytes: int) -> list[bytes]:
        """Returns the lines at the end of the file; the first line may be cut."""
        if self._path is None or not is_first():
            return []
        try:
            with open(self._path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - num_bytes))
                return file.read().split(b"\n")
        except OSError:  # There is no file yet, or its reader reports the error.
            return []

    def append(self, lines: str) -> None:
        """Appends whole lines; the first call makes the file and its directory."""
        if self._path is None or not is_first():
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _append(self._path, lines.encode())
        except OSError as error:
            lost = f"so {self._what} not recorded from here on: {error}"
            logger.warning(f"cannot write {self._path}, {lost}")
            self._path = None


def _append(path: Path, lines: bytes) -> None:
    # Opened for each call, because calls are rare, and idle programs should not keep
    # files open.
    with open(path, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                lines = b"\n" + lines
        file.write(lines)


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the number and value of each line; `...` for an incomplete line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(
            f"`{path}` cannot be read ({error.strerror}), but it must be the record "
            "that a `Controller` wrote. Change its rights, or use another run."
        ) from error
    for number, line in enumerate(lines, start=1):
        if line:
            try:
                yield number, json.loads(line)
            except ValueError:
                yield number, ...
            except RecursionError:  # No record is nested so deep.
                yield number, None


def write_whole(path: epath.Path, data: bytes | bytearray, temporary: str) -> None:
    """Writes a file that gets its name only when it is on the disk."""
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
