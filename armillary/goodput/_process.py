"""How long this process has run: the start-up that a restart has to pay for."""

import os
import sys
import time

_imported_at = time.perf_counter()
_is_claimed = False


def claim_start_up() -> float:
    """Returns the age of this process in seconds, to the first caller.

    Later callers get 0, because start-up is counted once; so does a program that is
    typed into a prompt, where the time went to thinking.
    """
    global _is_claimed
    if _is_claimed or hasattr(sys, "ps1"):
        return 0.0
    _is_claimed = True
    age = _read_process_age()
    return time.perf_counter() - _imported_at if age is None else age


def _read_process_age() -> float | None:
    """Returns what the system says, or `None` where it does not in this way."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            # The name of the program comes first, and may hold spaces and brackets.
            fields = file.read().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    return age if age > 0 else None
