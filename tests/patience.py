"""Limits for waiting, which grow with the load of the machine.

No test measures time. A test waits for an event, and a limit only ends a test that
would wait forever. A limit is written as the seconds that are generous on an idle
machine. `patience` multiplies it by a factor that is measured once, before the first
test. Workers of pytest-xdist and processes that tests start inherit the factor.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

FACTOR = "ARMILLARY_TEST_PATIENCE"
IDLE_SECONDS = 1.0  # One CPU core of a usual machine imports JAX in this time.
EVENT_SECONDS = 120.0
POLL_SECONDS = 0.02


def calibrate() -> None:
    """Measures how much slower than an idle machine this one is, unless that is known.

    The unit of work is the start of a process that imports JAX, because most tests that
    wait start such a process. A first import may read files from a cold disk, so a slow
    start is measured again.
    """
    if FACTOR in os.environ:
        return

    seconds = _start_process()
    if seconds > 2 * IDLE_SECONDS:
        seconds = min(seconds, _start_process())
    os.environ[FACTOR] = f"{max(1.0, seconds / IDLE_SECONDS):.2f}"


def _start_process() -> float:
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import jax"], check=True)
    return time.monotonic() - start


def patience(seconds: float) -> float:
    """Returns how long to wait here for what may take `seconds` on an idle machine."""
    return seconds * float(os.environ.get(FACTOR, "1"))


def wait_until(
    condition: Callable[[], T],
    what: str | Callable[[], str] = "the condition",
    seconds: float = EVENT_SECONDS,
) -> T:
    """Returns the first true value of `condition`, or fails after a generous limit.

    Args:
        condition: Function that is called until it returns a true value.
        what: Name of the event in the message, or a function that describes what there
            is instead.
        seconds: Limit on an idle machine.

    Returns:
        The true value.

    Raises:
        AssertionError: If the limit is over.
    """
    limit = patience(seconds)
    end = time.monotonic() + limit
    while not (value := condition()):
        if time.monotonic() > end:
            text = what if isinstance(what, str) else what()
            raise AssertionError(f"Waited {limit:.0f} s in vain: {text}")
        time.sleep(POLL_SECONDS)
    return value
