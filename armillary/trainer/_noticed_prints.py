"""Notices that a step prints a tracer."""

import contextlib
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

from armillary._logging import logger

_is_noticing = threading.Lock()
_TRACER = re.compile(r"Tracer\(|Traced<")


class _Noticing:
    """A stream that forwards all text, and notes whether a tracer was printed."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.has_tracer = False

    def write(self, text: str) -> Any:
        self.has_tracer = self.has_tracer or _TRACER.search(text) is not None
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def noticing_prints(name: str) -> Iterator[None]:
    """Warns if a step prints a tracer, which has no value while it is traced."""
    # One at a time, because two threads would restore each other's stream.
    if sys.stdout is None or not _is_noticing.acquire(blocking=False):
        yield
        return
    stream: Any = _Noticing(sys.stdout)
    try:
        with contextlib.redirect_stdout(stream):
            yield
    finally:
        _is_noticing.release()
    if stream.has_tracer:
        logger.warning(
            "`%s` printed a tracer, which stands for an array without a value, because "
            "Python runs a step only once, while it is traced. To print in each step, "
            'write `jax.debug.print("{}", x)`. To run line by line on one device, use '
            "`compile_step=False` in the options of the trainer.",
            name,
        )
