"""Frees the compiled programs that a process of the tests no longer needs.

JAX keeps every program that it has compiled. After some thousand tests a process holds
3 GB, and a few of them fill a machine.
"""

import ctypes
import gc
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

MAX_BYTES = 10**9
MEMORY = Path("/proc/self/statm")
PAGE_BYTES = resource.getpagesize()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Iterator[None]:
    """Frees programs between two modules, where fixtures of a module are gone too."""
    result = yield
    module_ends = nextitem is None or nextitem.path != item.path
    if module_ends and measure_resident_bytes() > MAX_BYTES:
        free_programs()
    return result


def measure_resident_bytes() -> int:
    """Returns the memory of this process; 0 where the system has no `/proc`."""
    if not MEMORY.exists():
        return 0
    resident_pages = MEMORY.read_text().split()[1]
    return int(resident_pages) * PAGE_BYTES


def free_programs() -> None:
    """Forgets all compiled programs, and gives their memory back to the system."""
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
        # Otherwise the C library keeps most of the memory for later.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
