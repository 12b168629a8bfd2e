"""Values in messages: one line, and not too long."""

from typing import Any

_MOST = 200  # characters; a path or a mesh fits


def shorten(value: Any) -> str:
    """Returns the `repr` of a value on one line, and only its beginning if it is long.

    A dictionary of parameters would hide its message behind pages of numbers.
    """
    text = repr(value)
    if "\n" in text:
        text = " ".join(text.split())
    if len(text) > _MOST:
        text = f"{text[:_MOST]}..."
    return text
