"""The progress of a run: a line that changes, or log lines about long phases.

A thread reads the phase of the goodput recorder, never a device. In a terminal or a
notebook, it updates one line. Elsewhere, it logs a line when a phase takes long.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping

from armillary._format import format_seconds
from armillary._logging import logger
from armillary._process import get_process
from armillary.controller._live_line import LiveLine, has_terminal
from armillary.controller._notebook_line import NotebookLine, has_notebook
from armillary.controller._outputs import ShortFloat, log_line
from armillary.controller._run import Run
from armillary.controller._start_lines import (
    describe_start,
    warn_if_alone,
)
from armillary.goodput._stopwatch import Category
from armillary.lifeline._lines import DEBUGGER, MAKERS, is_in, read_stack

_REFRESH_SECONDS = 0.25
_LOOK_SECONDS = 1.0
_LONG_SECONDS = 30.0


class Display:
    """Shows the progress of a controller's calls while they run."""

    def __init__(self, run: Run, progress: bool) -> None:
        self._run = run
        self._progress = progress
        self._is_on = False
        self._has_logged = False
        # The duration at which each phase is logged. A phase may always take as long
        # as it took before.
        self._thresholds: dict[Category, float] = {}
        self._reset("train", -1, -1)

    def _reset(self, loop: str, step: int, target: int) -> None:
        self._loop = loop
        self._step = step
        self._target = target
        self._first: tuple[float, int] | None = None
        self._end = 0.0
        self._speed: float | None = None
        self._scalars: Mapping[str, float] = {}

    def log_start(self) -> None:
        """Logs the lines of `describe_start`, once."""
        if not self._has_logged:
            self._has_logged = True
            warn_if_alone()
            for line in describe_start(self._run):
                logger.info("%s", line)

    @contextlib.contextmanager
    def on(self, loop: str, step: int, target: int = -1) -> Iterator[None]:
        """Shows the progress of a block; a block inside another block adds nothing."""
        if self._is_on or not self._progress or not get_process().is_chief:
            yield
            return
        self._is_on = True
        self._reset(loop, step, target)
        line = make_line()
        is_over = threading.Event()
        thread = threading.Thread(
            target=self._look,
            args=(threading.get_ident(), line, is_over),
            name="armillary-display",
            daemon=True,
        )
        try:
            thread.start()
            yield
        finally:
            # ORDER: the terminal comes first, because Ctrl-C may end the wait for the
            # thread.
            self._is_on = False
            if line is not None:
                line.close()
            is_over.set()
            thread.join()

    def note(self, step: int, speed: float, scalars: Mapping[str, float]) -> None:
        """Notes the results of a training loop that has ended, for the line to show."""
        now = time.perf_counter()
        if self._first is None:
            self._first = (now, step)
        began, first = self._first
        # The ETA assumes the mean pace since the first loop. It includes evaluations
        # and saves.
        pace = (now - began) / (step - first) if step > first else 1 / speed
        self._end = now + pace * (self._target - step)
        self._step = step
        self._speed = speed
        self._scalars = scalars

    def _look(
        self,
        watched: int,
        line: "LiveLine | NotebookLine | None",
        is_over: threading.Event,
    ) -> None:
        """Shows the phase of the watched thread, and how long it was seen."""
        seen: tuple[Category, float] | None = None
        since = 0.0
        stopwatch = self._run.goodput
        while not is_over.wait(_LOOK_SECONDS if line is None else _REFRESH_SECONDS):
            category = stopwatch.category
            began = stopwatch.began
            if category is None or is_in(DEBUGGER, stack := read_stack(watched)):
                continue
            if is_in(MAKERS, stack):
                category = Category.COMPILING
                began = 0.0
            if seen != (category, began):
                seen = (category, began)
                since = time.perf_counter()
            seconds = time.perf_counter() - since
            if line is not None:
                line.show(self._describe(category, seconds))
            else:
                self._log_if_long(category, seconds)

    def _log_if_long(self, category: Category, seconds: float) -> None:
        """Logs that a phase takes long: after 30 seconds, then 60, 120, and so on."""
        threshold = self._thresholds.get(category, _LONG_SECONDS)
        if seconds >= threshold:
            self._thresholds[category] = 2 * threshold
            text = f"{category.label} for {format_seconds(int(threshold))} ..."
            log_line(self._loop, self._step, text)

    def _describe(self, category: Category, seconds: float) -> str:
        parts = [f"step {self._step}"]
        if self._target > 0:
            percent = 100 * self._step // self._target
            parts = [f"step {self._step}/{self._target} ({percent}%)"]
        left = self._end - time.perf_counter()
        if left > 0:
            parts.append(f"ETA {format_seconds(int(left))}")
        if self._speed is not None:
            parts.append(f"{self._speed:.1f} steps/sec")
        duration = f" for {format_seconds(int(seconds))}" if seconds >= 1 else ""
        parts.append(f"{category.label}{duration}")
        losses = [name for name in self._scalars if name.endswith("loss")]
        if losses:
            name = losses[0]
            parts.append(f"{name} {ShortFloat(self._scalars[name])!r}")
        return " | ".join(parts)


def make_line() -> "LiveLine | NotebookLine | None":
    """Returns the line to update, or `None` where it would be read later, in a file."""
    if has_terminal():
        return LiveLine()
    return NotebookLine() if has_notebook() else None
