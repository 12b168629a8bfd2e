"""Records which attributes of a trainer a step looks at while it is traced.

A trainer counts epochs, keeps paths and names. A value that no step reads may change
between loops without a thought; one that a step has read is part of the compiled
program.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

_recorders: dict[int, Callable[[str], None]] = {}


class RecordsReads:
    """An object that tells which of its attributes are looked at, if someone asks."""

    if not TYPE_CHECKING:  # as a type checker would take every attribute to exist

        def __getattribute__(self, name: str) -> Any:
            if _recorders and (record := _recorders.get(id(self))) is not None:
                record(name)
            return super().__getattribute__(name)


@contextlib.contextmanager
def recorded_reads(owner: Any, record: Callable[[str], None]) -> Iterator[None]:
    """Calls `record` with the name of each attribute that is read from `owner`.

    An owner that does not tell counts as one of which everything is read.
    """
    if not isinstance(owner, RecordsReads):
        record("__dict__")
    _recorders[id(owner)] = record
    try:
        yield
    finally:
        del _recorders[id(owner)]
