"""Files that attempts of a run append lines to, and nobody ever cuts.

A process that is killed, or a full disk, may leave half a line at the end. Whoever
appends next begins a line of its own, and readers skip the half.
"""

import os
from pathlib import Path


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
