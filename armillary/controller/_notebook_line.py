"""One line in a notebook that changes while a program runs.

It is an output of its own above the log, and is displayed again for each change.
"""

import importlib
import logging
import sys
import threading

from armillary._logging import logger


def has_notebook() -> bool:
    """Returns whether a Jupyter kernel runs the program, and INFO lines are shown."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return False
    # Only the shell of a kernel has this attribute: IPython in a terminal does not.
    kernel = getattr(ipython.get_ipython(), "kernel", None)
    return kernel is not None and logger.isEnabledFor(logging.INFO)


class NotebookLine:
    """Displays a line until `close`. `show` may be called from any thread."""

    def __init__(self) -> None:
        # A signal may interrupt the thread that holds it, and its handler may print.
        self._lock = threading.RLock()
        self._is_closed = False
        # Here, because the thread that calls `show` belongs to no cell.
        display = importlib.import_module("IPython.display").display
        self._handle = display(_as_output(""), raw=True, display_id=True)

    def show(self, text: str) -> None:
        """Displays `text` in place of the text before."""
        with self._lock:
            if not self._is_closed:
                self._handle.update(_as_output(text), raw=True)

    def close(self) -> None:
        """Empties the line."""
        with self._lock:
            self._is_closed = True
            self._handle.update(_as_output(""), raw=True)


def _as_output(text: str) -> dict[str, str]:
    return {"text/plain": text}
