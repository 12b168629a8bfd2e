"""Keeps the programs of a function while they are correct.

A program depends on three things: the slots of its state, the kind of its arguments,
and the plain Python values (flags, rates, names) that the function read in the trace.
Between calls, the user may change all of them:

    program    a new kind of arguments   new plain values   new slots   none of these
    -------    -----------------------   ----------------   ---------   --------------
    unknown    trace and compile         -                  -           -
    current    another program           doubted            unknown     run
    doubted    another program           doubted            unknown     trace, compare

If the trace of a doubted program is the same as before, the program is current again.
Otherwise, it is compiled again.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from armillary.distribute._strategy import Strategy
from armillary.distribute.program._flat_state import FlatState
from armillary.state._lift import State

P = TypeVar("P")


class Programs(Generic[P]):
    """The programs of one function, by the kind of its arguments.

    Attributes:
        flat: The state that all programs work on; `None` before the first search.
        current: The programs that are correct.
        doubted: The programs that may be outdated.
        reason: The last change that made programs doubtful.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.flat: FlatState | None = None
        self.current: dict[Any, P] = {}
        self.doubted: dict[Any, P] = {}
        self.reason = ""

    def find_current(self) -> FlatState | None:
        """Returns the state, or `None` if a new search must find it."""
        flat = self.flat
        if flat is not None and flat.state.is_current() and flat.fits():
            return flat
        return None

    def adopt(self, state: State) -> FlatState:
        """Continues with a newly found state, and sorts out the programs."""
        flat = self.flat
        # The signature that `flat` had when it was made: the structure of its slots may
        # have changed since then.
        if flat is None or not flat.serves(state):
            self.current.clear()
            self.doubted.clear()
            self.flat = FlatState(state, self._strategy)
            return self.flat

        changes = state.changes_since(flat.state)
        if changes:
            names = ", ".join(sorted(changes)[:5])
            self.doubt(
                f"it read plain values that have changed ({names}). Hold a value that "
                "changes often in an array, so that it is an input of the compiled step"
            )
        flat.rebind(state)
        return flat

    def doubt(self, reason: str) -> None:
        """Marks every program as doubtful.

        The next trace shows whether the function read the changed values.
        """
        self.doubted.update(self.current)
        self.current.clear()
        self.reason = reason

    @contextlib.contextmanager
    def tracing(self) -> Iterator[FlatState]:
        """Gives the state for a trace, and watches the values that the trace reads."""
        flat = self.flat
        assert flat is not None
        was_current = flat.state.is_current()
        yield flat
        flat.state.watch()
        if was_current and not flat.state.is_current():
            # The function sets a plain value to the same value in every call.
            flat.rebind(flat.state.search_again())
