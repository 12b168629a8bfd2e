"""The file of a run that attempts append to: one line of JSON, one look at the clock.

A line holds the totals of its attempt so far, so a line that is missing costs only
detail.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from armillary._lines_file import append_lines
from armillary._logging import logger
from armillary._process import is_first
from armillary.goodput._category import Category

FILE_NAME = "goodput.jsonl"
_FORMAT = "armillary-goodput-1"


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
    """Appends lines to the file of a local directory, in the first process of a job.

    A failure is logged once and ends the recording, not the training.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._path = Path(directory) / FILE_NAME
        self._is_on = True

    def append(self, entry: Entry) -> None:
        """Writes one line."""
        if not self._is_on or not is_first():
            return
        try:
            append_lines(self._path, _format(entry))
        except OSError as error:
            self._is_on = False
            logger.warning(
                "cannot write %s, so where the time goes is not recorded from here "
                "on: %s",
                self._path,
                error,
            )


def read_entries(path: str | os.PathLike[str]) -> tuple[list[Entry], list[int]]:
    """Reads a journal.

    Returns its entries in order, and the numbers of the lines that are none, which is
    what a crash or a full disk leaves of a line.
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
        entry = _parse(line)
        if entry is not None:
            entries.append(entry)
        elif line:
            unreadable.append(number)
    if not entries:
        raise ValueError(
            f"`{path}` has {len(unreadable)} lines that are not empty, but none in the "
            f"format {_FORMAT!r}, which this version of Armillary reads. Use the "
            "version that wrote it or the directory of another run, or move the file "
            "away to record anew."
        )
    return entries, unreadable


def _format(entry: Entry) -> bytes:
    seconds = {name: round(value, 6) for name, value in entry.seconds.items() if value}
    record = {"format": _FORMAT, **vars(entry), "seconds": seconds}
    record["done"] = record.pop("is_done")
    return json.dumps(record).encode() + b"\n"


def _parse(line: bytes) -> Entry | None:
    """Returns the entry of a line, or `None` if it is none."""
    try:
        record = json.loads(line)
        if record.pop("format") != _FORMAT:
            return None
        record["is_done"] = record.pop("done")
        values = record.pop("seconds").items()
        seconds = {Category(name): float(value) for name, value in values}
        entry = Entry(**record, seconds=seconds)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    texts, numbers = (entry.attempt, entry.event), (entry.time, *seconds.values())
    is_one = type(entry.step) is int and all(isinstance(each, str) for each in texts)
    is_one = is_one and all(isinstance(each, int | float) for each in numbers)
    return entry if is_one and all(map(math.isfinite, numbers)) else None
