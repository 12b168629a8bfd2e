"""The signal that a step returned more metrics than there is room for."""

from collections.abc import Callable


class NeedsRoom(BaseException):
    """A step returned more metrics than there is room for; it must run again.

    It is not an `Exception`, so the user's handlers do not catch it.
    """

    def __init__(self, make_room: Callable[[], None]) -> None:
        self.make_room = make_room
