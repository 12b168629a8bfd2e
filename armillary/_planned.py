"""The state of a plan: whether the program may hold arrays without values.

A plan needs only shapes. In a plan, a `jax.ShapeDtypeStruct` counts as an array of the
state, and `strategy.make` makes nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class _Planning(NamedTuple):
    """The properties of a plan.

    Attributes:
        has_stand_ins: Whether the devices of this process stand for the planned ones.
    """

    has_stand_ins: bool


_planning: ContextVar[_Planning | None] = ContextVar("_planning", default=None)


def is_planning() -> bool:
    """Returns whether the code runs for a plan."""
    return _planning.get() is not None


def has_stand_ins() -> bool:
    """Returns whether the devices of this process stand for the planned ones.

    Then a strategy without devices of its own takes only one of them, as on a machine
    with one device, and a mesh takes as many as it needs.
    """
    now = _planning.get()
    return now is not None and now.has_stand_ins


@contextmanager
def planning(*, has_stand_ins: bool = False) -> Iterator[None]:
    """Makes the code inside run for a plan."""
    is_inside = _planning.get() is not None
    token = _planning.set(_planning.get() if is_inside else _Planning(has_stand_ins))
    try:
        yield
    finally:
        _planning.reset(token)
