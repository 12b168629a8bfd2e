"""What a program does now, and for how long: for people who wait for it."""

import threading
import time

from armillary.goodput._category import Category
from armillary.goodput._stopwatch import Stopwatch
from armillary.lifeline._line import is_in_debugger, is_making_program


class PhaseClock:
    """Looks at a stopwatch from another thread, now and then; it is this thread's.

    JAX reports a compilation when it has ended. What is still being compiled is seen on
    the stack of the thread that the stopwatch counts.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch, self._thread = stopwatch, threading.get_ident()
        self._looked_at = self._since = time.perf_counter()
        self._category: Category | None = None

    def is_paused(self) -> bool:
        """Returns whether somebody looks at the program in a debugger."""
        return is_in_debugger(self._thread)

    def look(self) -> tuple[Category | None, float]:
        """Returns the category, and when it began, by `time.perf_counter`."""
        category, began = self._stopwatch.category, self._stopwatch.began
        if category is not None and is_making_program(self._thread):
            category = Category.COMPILING
        if Category.COMPILING not in (category, self._category):
            self._since = began
        elif category is not self._category:
            self._since = max(began, self._looked_at)
        self._category, self._looked_at = category, time.perf_counter()
        return category, self._since
