"""Signs of life: what a run does now, while it goes on.

A thread looks at the phase that the goodput recorder is in. In a terminal it keeps one
line up to date. Elsewhere it logs one line when a phase takes long. It reads attributes
that the training thread sets, and never touches a device.

The line is no `Live` of Rich: that hides the cursor, and log handlers that were made
before it write past it. Here whatever Python writes passes through `write` of the
stream, where the line is wiped before and, once what was written ends a line, drawn
again by the next `show`. What XLA writes past Python lands on the line, and the next
`show` is below.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from armillary._format import format_seconds
from armillary._logging import get_console, is_terminal, logger
from armillary._process import get_process
from armillary.controller._outputs import ShortFloat, log_line
from armillary.goodput._journal import Recorder
from armillary.goodput._stopwatch import Category, PhaseClock

if TYPE_CHECKING:
    from rich.text import Text

_TO_END = "\x1b[K"
_REFRESH_SECONDS = 0.25
_LOOK_SECONDS = 1.0
_LONG_SECONDS = 30.0
# What is over sooner is not worth a word, or a flicker.
_SHORT_SECONDS = 1.0


class Display:
    """What a person sees of a controller's calls while they run."""

    def __init__(self, recorder: Recorder, progress: bool | None) -> None:
        self._recorder, self._progress = recorder, progress
        self._is_on = False
        # As long as a phase took once, it may take again.
        self._thresholds: dict[Category, float] = {}
        self._reset("train", -1, -1)

    def _reset(self, loop: str, step: int, target: int) -> None:
        self._loop, self._step, self._target = loop, step, target
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None
        self._speed: float | None = None
        self._scalars: Mapping[str, float] = {}

    @contextlib.contextmanager
    def on(self, loop: str, step: int, target: int = -1) -> Iterator[None]:
        """Shows what goes on in a block; inside another one, nothing is added."""
        if self._is_on or self._progress is False or not get_process().is_chief:
            yield
            return
        self._is_on = True
        self._reset(loop, step, target)
        is_shown = self._progress or _has_terminal()
        line = LiveLine() if is_shown and _can_draw(sys.stderr) else None
        is_over, clock = threading.Event(), PhaseClock(self._recorder)
        look = (clock, line, is_over)
        thread = threading.Thread(
            target=self._look, args=look, name="armillary-display", daemon=True
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
        """Takes what the line shows of a loop of training that has ended."""
        self._last = (time.perf_counter(), step)
        self._first = self._first or self._last
        self._step, self._speed, self._scalars = step, speed, scalars

    def _look(
        self, clock: PhaseClock, line: "LiveLine | None", is_over: threading.Event
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
                self._say_if_long(category, seconds)

    def _say_if_long(self, category: Category, seconds: float) -> None:
        """Logs that a phase takes long: after 30 seconds, and each time twice that."""
        threshold = self._thresholds.get(category, _LONG_SECONDS)
        if seconds >= threshold:
            self._thresholds[category] = 2 * threshold
            loop = "eval" if category is Category.EVALUATING else self._loop
            said = f"{category.label} for {format_seconds(int(threshold))} ..."
            log_line(loop, self._step, said)

    def _describe(self, category: Category, seconds: float) -> "Text":
        from rich.text import Text

        step = f"step {self._step}"
        if self._target > 0:
            step += f"/{self._target} ({100 * self._step // self._target}%)"
        parts = [(step, "bold")]
        left = self._seconds_left()
        if left is not None:
            parts.append((f"ETA {format_seconds(int(left))}", ""))
        if self._speed is not None:
            parts.append((f"{self._speed:.1f} steps/sec", ""))
        doing = category.label
        if seconds >= _SHORT_SECONDS:
            doing += f" for {format_seconds(int(seconds))}"
        elif category is Category.OTHER:
            doing = Category.STEPPING.label
        parts.append((doing, "cyan"))
        names = [name for name in self._scalars if name.endswith("loss")]
        names = ["loss"] if "loss" in names else names or list(self._scalars)
        for name in names[:1]:
            parts.append((f"{name} {ShortFloat(self._scalars[name])!r}", ""))
        return Text(" | ").join(Text(*part) for part in parts)

    def _seconds_left(self) -> float | None:
        """Returns how long training still takes, evaluations and saves included."""
        first, last = self._first, self._last
        if self._target < 0 or not (first and last and self._speed):
            return None
        seconds_per_step = 1 / self._speed
        if last[1] > first[1]:
            seconds_per_step = (last[0] - first[0]) / (last[1] - first[1])
        left = (self._target - last[1]) * seconds_per_step
        left -= time.perf_counter() - last[0]
        return left if left > 0 else None


def _has_terminal() -> bool:
    """Returns whether somebody watches who can be shown a line that changes."""
    environ = os.environ
    is_plain = environ.get("NO_COLOR") or environ.get("TERM") in ("dumb", "unknown")
    is_silenced = not logger.isEnabledFor(logging.INFO)
    return not (is_plain or is_silenced) and is_terminal(sys.stderr)


def _can_draw(stream: Any) -> bool:
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
            if _can_draw(stream) and (stream is self._stream or is_terminal(stream))
        ]

    def show(self, text: "Text") -> None:
        """Draws `text` in place of what was shown, cut off at the edge."""
        text.truncate(self._console.width - 1, overflow="ellipsis")
        with self._console.capture() as capture:
            self._console.print(text, end="", highlight=False, no_wrap=True)
        with self._lock:
            is_free = self._is_at_start and not self._is_closed
            if is_free and self._is_in_foreground():
                self._put(f"\r{capture.get()}{_TO_END}\r")
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
        write, own = stream.write, vars(stream)
        had_own = "write" in own

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
            if own.get("write") is write_beside:
                own["write"] = write
                if not had_own:
                    del own["write"]

        own["write"] = write_beside
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
