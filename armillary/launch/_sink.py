"""Places that lines are written to: the streams of the launcher, and log files."""

import os
import select
from pathlib import Path
from typing import TextIO

_COLORS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green")


class StreamSink:
    """Writes to stdout or stderr of the launcher, with colored labels on a terminal.

    A reader that went away (`armillary launch ... | head`) must not end the training,
    so lines are dropped from then on.
    """

    def __init__(self, stream: TextIO | None) -> None:
        # Python has no stream where the launcher was started with a closed one.
        self._descriptor = None if stream is None else stream.fileno()
        self._encoding = "utf-8" if stream is None else stream.encoding
        self._stream = stream
        self._prefixes: dict[str, str] = {}

    def write(self, label: str, line: str) -> None:
        """Writes `line` behind `[label]`, or drops it if nobody can read it."""
        if self._descriptor is None:
            return
        if label not in self._prefixes:
            self._prefixes[label] = self._make_prefix(label)
        text = f"{self._prefixes[label]} {line}\n"
        try:
            _write_all(self._descriptor, text.encode(self._encoding, "replace"))
        except OSError:
            self._descriptor = None

    def _make_prefix(self, label: str) -> str:
        prefix = f"[{label}]"
        if self._stream is None or not self._stream.isatty():
            return prefix
        from rich.color import ColorSystem
        from rich.console import Console
        from rich.style import Style

        console = Console(file=self._stream)
        if console.color_system is None or console.no_color:
            return prefix
        number = label.rpartition(" ")[2]
        color = _COLORS[int(number) % len(_COLORS)] if number.isdecimal() else "bold"
        return Style.parse(color).render(prefix, color_system=ColorSystem.STANDARD)


class LogFile:
    """Appends lines to a file, which is created with the user's umask.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)

    def write(self, line: str) -> None:
        """Appends one line; an `OSError` ends the file."""
        _write_all(self._file.fileno(), f"{line}\n".encode())

    def close(self) -> None:
        """Closes the file; closing it again does nothing."""
        self._file.close()


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            # Another user of the same terminal may have made it non-blocking.
            select.select([], [descriptor], [])
