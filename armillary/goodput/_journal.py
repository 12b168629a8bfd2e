"""The file of a run that attempts append to: one line of JSON, one look at the clock.

A line holds the totals of its attempt so far, so a line that is missing costs only
detail. Lines are written whole and at once. Where a crash or a full disk left half of
one, the next attempt starts a new line, and readers skip the half.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from armillary._logging import logger
from armillary.goodput._category import Category

FILE_NAME = "goodput.jsonl"
_FORMAT = "armillary-goodput"
_VERSION = 1


@dataclass(frozen=True)
class Entry:
    """One line: what an attempt has done so far.

    Args:
        attempt: Names the attempt, which is one controller in one process.
        event: Why the line was written.
        time: When, in seconds since the epoch.
        step: The global step.
        is_done: Whether training had ended as planned.
        seconds: Seconds of the attempt by category.
    """

    attempt: str
    event: str
    time: float
    step: int
    is_done: bool
    seconds: dict[Category, float]


class Journal:
    """Appends lines to the file of a directory; the first process of a job does.

    A failure is logged once and ends the recording, not the training.

    Args:
        directory: A local directory, made by the first line.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._path = Path(directory) / FILE_NAME
        self._is_begun = False
        self._is_on = True

    def append(self, entry: Entry) -> None:
        """Writes one line."""
        if not self._is_on:
            return
        try:
            self._append(entry)
        except OSError as error:
            self._is_on = False
            logger.warning(
                "cannot write %s, so where the time goes is not recorded from here "
                "on: %s",
                self._path,
                error,
            )

    def _append(self, entry: Entry) -> None:
        if not self._is_begun:
            # JAX is asked because the program may have joined the processes itself; not
            # in the constructor, as that would start the devices.
            self._is_on = jax.process_index() == 0
            if not self._is_on:
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
        line = _format(entry)
        # Opened anew, as it is done rarely, and no file stays open in idle programs.
        with open(self._path, "a+b", buffering=0) as file:
            if not self._is_begun and not _ends_with_line(file):
                line = b"\n" + line
            self._is_begun = True
            if file.write(line) != len(line):
                raise OSError("only a part of the line was written")


class NoopJournal:
    """Has the methods of `Journal` and writes nothing."""

    def append(self, entry: Entry) -> None:
        """Writes nothing."""


def read_entries(path: str | os.PathLike[str]) -> tuple[list[Entry], list[int]]:
    """Reads a journal.

    Args:
        path: The file.

    Returns:
        Its entries in order, and the numbers of the lines that are none, which is what
        a crash or a full disk leaves of a line.

    Raises:
        ValueError: If it cannot be read, holds no entry, or was written by a version
            of the library with another format.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(
            f"`{path}` cannot be read ({error.strerror}), but it must be the record "
            "that a `Controller` wrote. Change its rights, or use another run."
        ) from error
    entries, unreadable = [], []
    for number, line in enumerate(lines, start=1):
        entry = _parse(line, path, number)
        if entry is not None:
            entries.append(entry)
        elif line:
            unreadable.append(number)
    if not entries:
        raise ValueError(
            f"`{path}` has no line that a `Controller` wrote, among "
            f"{len(unreadable)} lines that are not empty. Use the directory of a run, "
            "or move the file away to record anew."
        )
    return entries, unreadable


def _format(entry: Entry) -> bytes:
    seconds = {
        str(name): round(value, 6) for name, value in entry.seconds.items() if value
    }
    record = {
        "format": f"{_FORMAT}-{_VERSION}",
        "attempt": entry.attempt,
        "event": entry.event,
        "time": round(entry.time, 6),
        "step": entry.step,
        "done": entry.is_done,
        "seconds": seconds,
    }
    return json.dumps(record).encode() + b"\n"


def _ends_with_line(file: Any) -> bool:
    size = file.seek(0, os.SEEK_END)
    if not size:
        return True
    file.seek(size - 1)
    return file.read(1) == b"\n"


def _parse(line: bytes, path: str | os.PathLike[str], number: int) -> Entry | None:
    try:
        record = json.loads(line)
        name, _, version = record["format"].rpartition("-")
        if name != _FORMAT:
            return None
        if version == str(_VERSION):
            entry = _as_entry(record)
            return entry if _has_times(entry) else None
    except (LookupError, ArithmeticError, ValueError, TypeError, AttributeError):
        return None
    except RecursionError:  # Thousands of brackets.
        return None
    raise ValueError(
        f"Line {number} of `{path}` has version {version!r} of the format, but this "
        f"version of Armillary reads version {_VERSION!r}. Use the version of "
        "Armillary that wrote it."
    )


def _as_entry(record: dict[str, Any]) -> Entry:
    return Entry(
        attempt=str(record["attempt"]),
        event=str(record["event"]),
        time=float(record["time"]),
        step=int(record["step"]),
        is_done=bool(record["done"]),
        seconds={
            Category(name): float(value) for name, value in record["seconds"].items()
        },
    )


def _has_times(entry: Entry) -> bool:
    numbers = [entry.time, *entry.seconds.values()]
    return all(math.isfinite(number) and number >= 0 for number in numbers)
