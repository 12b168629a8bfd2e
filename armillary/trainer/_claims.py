"""Keeps two threads from running steps with the same state at the same time.

While a step is traced or runs, the variables hold temporary values. A second thread
would read these values, and destroy the state. So the thread that runs a trainer or an
evaluator claims it. Objects that share no state may run in different threads.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from armillary.errors import StateStructureError, ThreadError
from armillary.state._slots import Slot
from armillary.state._walk import slots_of


class _Claim(NamedTuple):
    """A trainer or evaluator that a thread runs now; `verb` says what it does."""

    owner: Any
    verb: str
    thread: threading.Thread


_lock = threading.RLock()
_claims: list[_Claim] = []


@contextlib.contextmanager
def claimed(owner: Any, verb: str) -> Iterator[None]:
    """Claims an object and its state for this thread, during a block.

    Args:
        owner: A trainer or an evaluator.
        verb: The use of the object, for the error of another thread.

    Raises:
        ThreadError: If another thread has claimed the same object, or one that shares
            state with it.
    """
    claim = _Claim(owner, verb, threading.current_thread())
    with _lock:
        for other in _claims:
            if other.thread is not claim.thread:
                _check_apart(claim, other)
        _claims.append(claim)
    try:
        yield
    finally:
        with _lock:
            index = next(i for i, candidate in enumerate(_claims) if candidate is claim)
            del _claims[index]


def _check_apart(claim: _Claim, other: _Claim) -> None:
    """Raises if two claims of different threads are about the same state."""
    if claim.owner is other.owner:
        _refuse(claim, other, "It is the same object.")

    # A new search each time, because the program may give one object the model of the
    # other at any time. It is needed only while two threads run steps.
    shared = _find_shared(claim.owner, other.owner)
    if shared:
        more = f" and {len(shared) - 3} more" if shared[3:] else ""
        _refuse(claim, other, f"Both use `{'`, `'.join(shared[:3])}`{more}.")


def _find_shared(owner: Any, other: Any) -> list[str]:
    """Returns the paths of the state that both objects reach."""
    own = _find_slots(owner)
    others = _find_slots(other)
    return [slot.path for key, slot in own.items() if key in others]


def _find_slots(owner: Any) -> dict[Any, Slot]:
    """Returns the state of an object, by the key of its places."""
    try:
        slots = slots_of([(owner, "")])
    except StateStructureError:
        return {}  # The step raises it as well, with a better message.
    return {slot.key: slot for slot in slots}


def _refuse(claim: _Claim, other: _Claim, why: str) -> None:
    own = type(claim.owner).__name__
    their = type(other.owner).__name__
    raise ThreadError(
        f"Thread {claim.thread.name!r} {claim.verb} `{own}`, while thread "
        f"{other.thread.name!r} {other.verb} `{their}`. {why} Only one thread at a "
        "time may use the state of a step. Wait for the other thread "
        "(`thread.join()`), or give each thread a trainer with its own model."
    )
