"""A clock whose times can be compared, even if a machine's clock is set back."""

import math
import time

_MIN_SECONDS = 1e-6  # the smallest difference of two times since the epoch


class RisingClock:
    """Seconds since the epoch that always rise, even if a machine's clock is set back.

    After that, the time continues from the last value, at the real speed. So values of
    one clock can be compared. `start_after` continues the clock of an earlier process.
    """

    def __init__(self) -> None:
        self._last = -math.inf
        self._read_at = 0.0

    def start_after(self, seconds: float) -> None:
        """Makes all further values larger than a value of an earlier clock."""
        if seconds > self._last:
            self._last = seconds
            self._read_at = time.monotonic()

    def now(self) -> float:
        """Returns the time, above every earlier value."""
        now = time.monotonic()
        passed = max(now - self._read_at, _MIN_SECONDS)
        self._last = max(time.time(), self._last + passed)
        self._read_at = now
        return self._last
