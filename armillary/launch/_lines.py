"""Whole lines of text from pieces of bytes."""

import codecs

MAX_LINE = 32 * 1024
"""Characters after which a line without an end is passed on all the same."""


class LineSplitter:
    """Turns the bytes that a process writes into the lines that a terminal shows.

    Bytes that are not UTF-8 become replacement characters. Of a progress bar, which
    returns to the start of its line, the last state before the line ends is kept.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""

    def feed(self, data: bytes) -> list[str]:
        """Returns the lines that `data` completes, without their ends."""
        *lines, rest = (self._partial + self._decoder.decode(data)).split("\n")
        shown = _show(rest)
        # A return at the very end may belong to "\r\n", so it decides nothing yet.
        if rest.endswith("\r"):
            shown += "\r"
        while len(shown) > MAX_LINE:
            lines.append(shown[:MAX_LINE])
            shown = shown[MAX_LINE:]
        self._partial = shown
        return [_show(line) for line in lines]

    def flush(self) -> list[str]:
        """Returns what is left when nothing more comes: one line or none."""
        rest = self._partial + self._decoder.decode(b"", final=True)
        self._partial = ""
        return [_show(rest)] if rest else []


def _show(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]
