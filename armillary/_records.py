"""What is written into files: numbers of an output, values of JSON, lines, whole files.

JSON knows no NaN and no infinity, so these are strings: `"NaN"`, `"Infinity"` and
`"-Infinity"`. Attempts of a run append lines of JSON to one file, and nobody ever cuts
it. A process that is killed, or a full disk, may leave half a line at its end: whoever
appends next begins a line of its own, and readers skip the half.
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
# To look at abstract types takes most of the time of a record.
_EXACT = frozenset({bool, int, str, type(None)})
_LEAST_SECONDS = 1e-6  # A float tells times since the epoch apart that differ by this.


def find_numbers(output: Mapping[Any, Any], path: str = "") -> dict[str, int | float]:
    """Returns the scalars of an output by path; whatever else it holds is left out."""
    found: dict[str, int | float] = {}
    for name, value in output.items():
        if isinstance(value, Mapping):
            found |= find_numbers(value, f"{path}{name}/")
        elif (number := _as_number(value)) is not None:
            found[f"{path}{name}"] = number
    return found


def _as_number(value: Any) -> int | float | None:
    if type(value) is float:
        return value
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        kind = value.dtype
        if value.shape or not (jnp.issubdtype(kind, jnp.number) or kind == np.bool_):
            return None
        value = np.asarray(value).item()
    if isinstance(value, bool | Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else None


def as_json(value: Any) -> Any:
    """Returns what JSON can hold: unknown kinds as strings, dataclasses as objects."""
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
    """Returns values as services show them: by path, and a list as a string.

    Raises:
        ValueError: If two of them get one path, or UTF-8 cannot encode one of them.
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
            yield from _flatten(item, f"{path}/{name}" if path else name)
    else:
        yield path, value if isinstance(value, int | float | str) else str(value)


class RisingClock:
    """Seconds since the epoch that never fall, also when a machine's clock is set back.

    Then the time continues from the last value, as fast as it really passes. So values
    of one clock can be compared. `start_after` continues a clock of an earlier process.
    """

    def __init__(self) -> None:
        self._last = -math.inf
        self._read_at = 0.0

    def start_after(self, seconds: float) -> None:
        """Lets all further values be above a value of an earlier clock."""
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
    """A local file that the first process of a job appends lines to.

    A failure is logged once and ends the recording, not the training: `what` are lost.
    """

    def __init__(self, path: Path | None, what: str) -> None:
        self._path, self._what = path, what

    @property
    def is_on(self) -> bool:
        """Whether lines of this process are written."""
        return self._path is not None and is_first()

    def read_end(self, num_bytes: int) -> list[bytes]:
        """Returns the lines at the end of the file, the first one maybe cut."""
        if self._path is None or not is_first():
            return []
        try:
            with open(self._path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - num_bytes))
                return file.read().split(b"\n")
        except OSError:  # There is no file yet, or its reader says what is wrong.
            return []

    def append(self, lines: str) -> None:
        """Appends whole lines; the first ones make the file and its directory."""
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
    # Opened anew, as it is done rarely, and no file stays open in idle programs.
    with open(path, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                lines = b"\n" + lines
        file.write(lines)


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the number and value of each line; of what a crash left of one, `...`."""
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
            except RecursionError:  # No record is nested as deep.
                yield number, None


def write_whole(path: epath.Path, data: bytes | bytearray, temporary: str) -> None:
    """Writes a file that has its name, and no temporary one, when it is on the disk."""
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
