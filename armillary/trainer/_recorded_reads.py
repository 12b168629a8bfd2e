"""Records which attributes of a trainer its step reads."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

_recorders: dict[int, Callable[[str], None]] = {}


@contextlib.contextmanager
def recorded_reads(owner: Any, record: Callable[[str], None]) -> Iterator[None]:
    """Calls `record` with the name of each attribute that is read from `owner`."""
    if not isinstance(owner, RecordedReads):
        record("__dict__")  # It cannot record reads, so every attribute counts.
    _recorders[id(owner)] = record
    try:
        yield
    finally:
        del _recorders[id(owner)]


class RecordedReads:
    """An object whose reads of attributes `recorded_reads` can record."""

    if not TYPE_CHECKING:  # as a type checker would take every attribute to exist
        # This runs for every attribute, so it does nothing unless a step is traced.
        def __getattribute__(self, name: str) -> Any:
            if _recorders and (record := _recorders.get(id(self))) is not None:
                record(name)
            return super().__getattribute__(name)
