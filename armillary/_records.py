"""Writes and reads the files of a run: lines of JSON, and whole files.

Attempts of a run append lines of JSON to one file, which is never cut. A process that
is killed, or a full disk, may leave an incomplete last line. The next writer then
begins a new line, and readers skip the incomplete line.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etils import epath

from armillary._logging import logger
from armillary._process import is_first


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
