"""The logger of the library, which prints even if a program configures no logging.

Programs configure the logger `armillary` like any other. A program that configured no
logging at all would see nothing of a training run, so `ensure_visible` gives the logger
its own handler, which writes nothing once the program sets up logging. In a job of
several processes, only the chief logs messages below the level of a warning.
"""

import functools
import logging
import sys
from typing import TYPE_CHECKING, Any

from armillary._process import get_process

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger("armillary")
"""Receives every message once; programs configure it like any other logger."""


def ensure_visible() -> None:
    """Shows INFO lines on stderr if the program has not configured any logging."""
    if logger.handlers or logger.level != logging.NOTSET or _is_root_configured():
        return
    logger.addHandler(_FallbackHandler())
    logger.setLevel(logging.INFO)
    # The root logger may hold a default handler that would print each line again.
    logger.propagate = False


class _FallbackHandler(logging.Handler):
    """Writes to stderr until the program configures logging, then forwards to it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes `record`; the loss of a terminal must not end the training."""
        if _is_root_configured():
            if logging.root.isEnabledFor(record.levelno):
                logging.root.callHandlers(record)
            return
        try:
            is_info = record.levelno == logging.INFO
            line = "" if is_info else f"{record.levelname}: "
            line += self.format(record)
            if is_terminal(sys.stderr):
                get_console().print(line, markup=False, soft_wrap=True)
            else:
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()
        except Exception:
            self.handleError(record)


def _keep(record: logging.LogRecord) -> bool:
    """Returns whether this process logs `record`; names the process in warnings."""
    process = get_process()
    is_warning = record.levelno >= logging.WARNING
    if process.count > 1 and is_warning:
        record.msg = f"{process}: {record.getMessage()}"
        record.args = ()
    return process.is_chief or is_warning


logger.addFilter(_keep)


def _is_root_configured() -> bool:
    """Returns whether the program, rather than a library, set up the root logger."""
    # absl, which Orbax and Grain log with, calls `logging.basicConfig()`.
    root = logging.root
    is_default = root.level == logging.WARNING and all(
        type(handler) is logging.StreamHandler
        and handler.formatter is not None
        and handler.formatter._fmt == logging.BASIC_FORMAT
        for handler in root.handlers
    )
    return not is_default


@functools.cache
def get_console() -> "Console":
    """Returns the console of the library, which writes to the current `sys.stderr`."""
    from rich.console import Console

    return Console(stderr=True)


def is_terminal(stream: Any) -> bool:
    """Returns whether a stream, which may be any object, is a terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # The object is not a file, or is closed.
        return False
