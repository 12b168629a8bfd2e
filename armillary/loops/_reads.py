"""Records which attributes of a trainer a step looks at while it is traced.

A trainer counts epochs, keeps paths and names. A value that no step reads may change
between loops without a thought; one that a step has read is part of the compiled
program.
"""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def recorded_reads(owner: Any) -> Iterator[set[str]]:
    """Yields a set that fills with the names of attributes read from `owner`.

    For the time being `owner` gets a subclass of its class; code in its methods cannot
    tell, except by comparing `type(self)`.
    """
    kind = type(owner)
    names: set[str] = set()

    def record(self: Any, name: str) -> Any:
        names.add(name)
        return kind.__getattribute__(self, name)  # pyright: ignore[reportCallIssue]

    owner.__class__ = type(
        kind.__name__,
        (kind,),
        {"__getattribute__": record, "__module__": kind.__module__},
    )
    try:
        yield names
    finally:
        owner.__class__ = kind
