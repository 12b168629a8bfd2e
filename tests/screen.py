"""A simulated terminal for tests, and the text that a person would see."""

import contextlib
import os
import pty
import select
from collections.abc import Callable, Iterator

from tests.patience import wait_until


class Screen:
    """Understands what the library writes: returns, ends of lines, colors, `K`.

    Args:
        leader: The side of the pair that a person looks at.

    Attributes:
        column: Where the cursor is.
        unknown: Control sequences that it does not understand.
    """

    def __init__(self, leader: int) -> None:
        self.leader, self.column = leader, 0
        self.unknown: set[str] = set()
        self._lines, self._rest = [""], ""

    def read(self) -> str:
        """Returns what is seen now, with lines that were scrolled away."""
        with contextlib.suppress(OSError):  # The other side is closed.
            while select.select([self.leader], [], [], 0)[0]:
                text = os.read(self.leader, 1 << 16).decode()
                if not text:
                    break
                self._feed(self._rest + text)
        return "\n".join(line.rstrip() for line in self._lines)

    def wait_for(self, text: str) -> str:
        """Returns what is seen once `text` is among it."""
        return self.wait_until(lambda seen: text in seen)

    def wait_until(self, holds: Callable[[str], bool]) -> str:
        """Returns what is seen once that holds."""
        wait_until(lambda: holds(self.read()), self.read)
        return self.read()

    def _feed(self, text: str) -> None:
        index = 0
        while index < len(text):
            character, index = text[index], index + 1
            if character == "\x1b":
                end = index + 1
                while end < len(text) and not text[end].isalpha():
                    end += 1
                if end == len(text):
                    self._rest = text[index - 1 :]
                    return
                self._control(text[index : end + 1])
                index = end + 1
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self._lines.append("")
            else:
                line = self._lines[-1].ljust(self.column)
                after = line[self.column + 1 :]
                self._lines[-1] = line[: self.column] + character + after
                self.column += 1
        self._rest = ""

    def _control(self, sequence: str) -> None:
        if sequence == "[K":
            self._lines[-1] = self._lines[-1][: self.column]
        elif not sequence.endswith("m"):
            self.unknown.add(sequence)


@contextlib.contextmanager
def open_screen() -> Iterator[tuple[Screen, int]]:
    """Yields a screen, and the side of the pair that a program writes to."""
    leader, follower = pty.openpty()
    try:
        yield Screen(leader), follower
    finally:
        os.close(leader)
        with contextlib.suppress(OSError):
            os.close(follower)
