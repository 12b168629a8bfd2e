"""One line at the bottom of a terminal, which steps aside for all that is written.

Whatever Python writes to the terminal, log lines among it, passes through `write` of
the stream. There the line is wiped before and, once what was written ends a line, drawn
again by the next `show`. The cursor stays visible, at the start of the line: what other
code writes past Python, such as XLA, lands on it, and the next `show` is below.
"""

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from armillary._logging import get_console, is_terminal

if TYPE_CHECKING:
    from rich.text import Text

_TO_END = "\x1b[K"


def can_draw(stream: Any) -> bool:
    """Returns whether the line could step aside for what is written to a stream."""
    return hasattr(stream, "__dict__") and callable(getattr(stream, "write", None))


class LiveLine:
    """Draws on stderr until `close`. `show` may be called from any thread."""

    def __init__(self) -> None:
        self._console, self._pid = get_console(), os.getpid()
        # One that holds it may be interrupted by a signal whose handler prints.
        self._lock = threading.RLock()
        self._stream = sys.stderr
        self._write: Callable[[str], Any] = sys.stderr.write
        self._is_shown, self._is_at_start, self._is_closed = False, True, False
        streams = {id(each): each for each in (sys.stderr, sys.stdout)}
        self._undo = [
            self._divert(stream)
            for stream in streams.values()
            if can_draw(stream) and (stream is self._stream or is_terminal(stream))
        ]

    def show(self, text: "Text") -> None:
        """Draws `text` in place of what was shown, cut off at the edge."""
        text.truncate(self._console.width - 1, overflow="ellipsis")
        with self._console.capture() as capture:
            self._console.print(text, end="", highlight=False, no_wrap=True)
        line = capture.get()
        with self._lock:
            is_free = self._is_at_start and not self._is_closed
            if is_free and self._is_in_foreground():
                self._put(f"\r{line}{_TO_END}\r")
                self._is_shown = True

    def close(self) -> None:
        """Wipes the line, and leaves the streams as they were."""
        with self._lock:
            self._wipe()
            self._is_closed = True
            for undo in self._undo:
                undo()

    def _divert(self, stream: TextIO) -> Callable[[], None]:
        """Lets the line step aside for a stream; returns a function that undoes it."""
        write, had_own = stream.write, "write" in vars(stream)

        def write_beside(text: str) -> int:
            # A process that was forked has a copy of the lock, perhaps held for ever.
            if self._is_closed or not text or os.getpid() != self._pid:
                return write(text)
            with self._lock:
                self._wipe()
                self._is_at_start = text.endswith("\n")
                return write(text)

        def undo() -> None:
            # Somebody may have put a function of his own over this one.
            if vars(stream).get("write") is not write_beside:
                return
            if had_own:
                vars(stream)["write"] = write
            else:
                del vars(stream)["write"]

        vars(stream)["write"] = write_beside
        return undo

    def _wipe(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._put(f"\r{_TO_END}")

    def _put(self, text: str) -> None:
        try:
            self._write(text)
            self._stream.flush()
        except (OSError, ValueError, AttributeError):
            # The terminal is gone, or the stream is closed. Training goes on.
            self._is_closed = True

    def _is_in_foreground(self) -> bool:
        """Returns whether the terminal is this job's, and not that of a shell again."""
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except (OSError, ValueError, AttributeError):
            return True  # It is not the terminal that this session belongs to.
