"""Signs of life: what a run does now, while it goes on.

A thread looks at the phase that the goodput recorder is in. In a terminal it keeps one
line up to date. Elsewhere it logs one line when a phase takes long. It reads attributes
that the training thread sets, and never touches a device.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING

from armillary._logging import is_terminal, logger
from armillary._process import get_process
from armillary.controller._live_line import LiveLine, can_draw
from armillary.controller._progress import format_scalar, log_line
from armillary.goodput._category import LABELS, Category
from armillary.goodput._phase import PhaseClock
from armillary.goodput._recorder import Recorder

if TYPE_CHECKING:
    from rich.text import Text

_REFRESH_SECONDS = 0.25
_LOOK_SECONDS = 1.0
_LONG_SECONDS = 30.0
# What is over sooner is not worth a word, or a flicker.
_SHORT_SECONDS = 1.0
# As long as it was once, it may be again.
_REGULAR = (Category.STEPPING, Category.EVALUATING)


class Display:
    """What a person sees of a controller's calls while they run."""

    def __init__(self, recorder: Recorder, progress: bool | None) -> None:
        self._recorder, self._progress = recorder, progress
        self._is_on = False
        self._loop, self._target, self._step = "train", -1, -1
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None
        self._speed: float | None = None
        self._scalars: Mapping[str, float] = {}
        self._thresholds: dict[Hashable, float] = {}

    @contextlib.contextmanager
    def on(self, loop: str, step: int, target: int = -1) -> Iterator[None]:
        """Shows what goes on in a block; inside another one, nothing is added."""
        if self._is_on or self._progress is False or not get_process().is_chief:
            yield
            return
        self._is_on = True
        self._loop, self._step, self._target = loop, step, target
        self._first = self._last = self._speed = None
        self._scalars = {}
        is_shown = self._progress or _has_terminal()
        line = LiveLine() if is_shown and can_draw(sys.stderr) else None
        is_over = threading.Event()
        clock = PhaseClock(self._recorder)
        thread = threading.Thread(
            target=self._look,
            args=(clock, line, is_over),
            name="armillary-display",
            daemon=True,
        )
        try:
            thread.start()
            yield
        finally:
            # ORDER: first the terminal; Ctrl-C may end the wait for the thread.
            self._is_on = False
            if line is not None:
                line.close()
            is_over.set()
            thread.join()

    def note(self, step: int, speed: float, scalars: Mapping[str, float]) -> None:
        """Hears of a loop of training that has ended."""
        self._last = (time.perf_counter(), step)
        self._first = self._first or self._last
        self._step, self._speed, self._scalars = step, speed, scalars

    def _look(
        self, clock: PhaseClock, line: LiveLine | None, is_over: threading.Event
    ) -> None:
        pause = _LOOK_SECONDS if line is None else _REFRESH_SECONDS
        while not is_over.wait(pause):
            category, began = clock.look()
            if category is None or clock.is_paused():
                continue
            seconds = time.perf_counter() - began
            if line is not None:
                line.show(self._describe(category, seconds))
            else:
                self._say_if_long(category, began, seconds)

    def _say_if_long(self, category: Category, began: float, seconds: float) -> None:
        """Logs that a phase takes long: after 30 seconds, and each time twice that."""
        key = category if category in _REGULAR else (category, began)
        threshold = self._thresholds.get(key, _LONG_SECONDS)
        if seconds < threshold:
            return
        self._thresholds[key] = 2 * threshold
        loop = "eval" if category is Category.EVALUATING else self._loop
        text = f"{LABELS[category]} for {format_seconds(threshold)} ..."
        log_line(loop, self._step, text)

    def _describe(self, category: Category, seconds: float) -> "Text":
        from rich.text import Text

        step = f"step {self._step}"
        if self._target > 0:
            step += f"/{self._target} ({100 * self._step // self._target}%)"
        parts = [(step, "bold")]
        left = self._seconds_left()
        if left is not None:
            parts.append((f"ETA {format_seconds(left)}", ""))
        if self._speed is not None:
            parts.append((f"{self._speed:.1f} steps/sec", ""))
        if seconds >= _SHORT_SECONDS:
            doing = f"{LABELS[category]} for {format_seconds(seconds)}"
        elif category is Category.OTHER:
            doing = LABELS[Category.STEPPING]
        else:
            doing = LABELS[category]
        parts.append((doing, "cyan"))
        name = _find_loss(self._scalars)
        if name is not None:
            parts.append((f"{name} {format_scalar(self._scalars[name])}", ""))
        return Text(" | ").join(Text(*part) for part in parts)

    def _seconds_left(self) -> float | None:
        """Returns how long training still takes, if it goes on as it did.

        Evaluations and saves are counted, but for the first ones.
        """
        first, last = self._first, self._last
        if self._target < 0 or not (first and last and self._speed):
            return None
        seconds_per_step = 1 / self._speed
        if last[1] > first[1]:
            seconds_per_step = (last[0] - first[0]) / (last[1] - first[1])
        left = (self._target - last[1]) * seconds_per_step
        left -= time.perf_counter() - last[0]
        return left if left > 0 else None


def format_seconds(seconds: float) -> str:
    """Returns a duration such as `12 s`, `1 min 5 s` or `2 h 5 min`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    large, small, units = whole // 60, whole % 60, ("min", "s")
    if large >= 60:
        large, small, units = large // 60, large % 60, ("h", "min")
    rest = f" {small} {units[1]}" if small else ""
    return f"{large} {units[0]}{rest}"


def _has_terminal() -> bool:
    """Returns whether somebody watches who can be shown a line that changes."""
    environ = os.environ
    is_plain = environ.get("NO_COLOR") or environ.get("TERM") in ("dumb", "unknown")
    is_silenced = not logger.isEnabledFor(logging.INFO)
    return not (is_plain or is_silenced) and is_terminal(sys.stderr)


def _find_loss(scalars: Mapping[str, float]) -> str | None:
    """Returns the name of the loss, or of what comes first."""
    names = [name for name in scalars if name.endswith("loss")]
    return next(iter(["loss"] if "loss" in scalars else names or scalars), None)
