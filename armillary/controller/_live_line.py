"""One line in a terminal that changes while a program runs.

It does not use `Live` of Rich, because `Live` hides the cursor, and log handlers that
exist before it write into the line. Here `write` of the stream is replaced, so all
output of Python wipes the line first.
"""

import io
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from armillary._logging import get_console, is_terminal, logger

_TO_END = "\x1b[K"


def has_terminal() -> bool:
    """Returns whether stderr is a terminal that can show a line that changes."""
    is_stream = isinstance(sys.stderr, io.TextIOBase) and is_terminal(sys.stderr)
    is_dumb = os.environ.get("TERM") in ("dumb", "unknown")
    return is_stream and not is_dumb and logger.isEnabledFor(logging.INFO)


class LiveLine:
    """Draws on stderr until `close`. `show` may be called from any thread."""

    def __init__(self) -> None:
        # It is reentrant, because a signal handler that prints may interrupt the thread
        # that holds it.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._stream = sys.stderr
        self._write = sys.stderr.write
        self._is_shown = False
        self._is_at_start = True
        self._is_closed = False
        self._undo = [self._divert(sys.stderr)]
        is_other = isinstance(sys.stdout, io.TextIOBase) and sys.stdout != sys.stderr
        if is_other and is_terminal(sys.stdout):
            self._undo.append(self._divert(sys.stdout))

    def show(self, text: str) -> None:
        """Draws `text` in place of the old text, cut off at the edge."""
        text = text[: get_console().width - 1]
        with self._lock:
            if self._is_at_start and not self._is_closed:
                self._put(f"\r{text}{_TO_END}\r")
                self._is_shown = True

    def close(self) -> None:
        """Wipes the line, and leaves the streams as they were."""
        with self._lock:
            self._wipe()
            self._is_closed = True
            for undo in self._undo:
                undo()

    def _divert(self, stream: Any) -> Callable[[], None]:
        """Wipes the line before writes to a stream; returns a function to undo this."""
        write = stream.write

        def wipe_and_write(text: str) -> int:
            # A forked process has a copy of the lock, which may be held forever.
            if self._is_closed or not text or os.getpid() != self._pid:
                return write(text)
            with self._lock:
                self._wipe()
                self._is_at_start = text.endswith("\n")
                return write(text)

        def undo() -> None:
            # The program may have replaced this function with its own.
            if stream.write is wipe_and_write:
                stream.write = write

        stream.write = wipe_and_write
        return undo

    def _wipe(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._put(f"\r{_TO_END}")

    def _put(self, text: str) -> None:
        try:
            self._write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The terminal is gone, or the stream is closed. Training continues.
            self._is_closed = True
