"""Writes the page of every name of TensorFlow and Orbit.

The page is `docs/migrate/tensorflow_names.md`. Names that have a meaning here are rows
of `tensorflow_names.toml`. The line to write in place of any other name comes from the
table of the errors, `armillary/advice/_foreign_names.py`. If you change one of them,
write the page again::

    python docs/site/tensorflow_names.py
"""

import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parents[1])]

import armillary.estimator  # noqa: E402, F401 - its names join the table
from armillary.advice._foreign_names import NAMES  # noqa: E402

PAGE = FOLDER.parent / "migrate" / "tensorflow_names.md"

_ROWS = FOLDER / "tensorflow_names.toml"
_NOT_THERE = "not there"
_HEAD = """\
# Names of TensorFlow and Orbit

<!-- Written by docs/site/tensorflow_names.py. -->
"""
_ERRORS = """\
## Names that errors answer

If you use one of these names and Armillary does not have it, the error ends with the
line to write. `Strategy.group` is the name `group` of a `Strategy`, and
`summary.scalar` is the name `scalar` of a package `summary`. Names without an owner are
answered by every package.
"""


def make_page() -> str:
    """Returns the page."""
    content = tomllib.loads(_ROWS.read_text())
    sections = [_make_section(section) for section in content["sections"]]
    answers = [(f"`{name}`", answer) for name, answer in sorted(NAMES.items())]
    parts = [
        _HEAD,
        content["introduction"],
        *sections,
        _ERRORS,
        _make_table(("name", "the error says"), answers),
    ]
    return "\n".join(parts)


def _make_section(section: dict[str, Any]) -> str:
    """Returns the table of a module or a class, with the text around it."""
    titles = ("there", "here", "what changed, and why")
    rows = [_complete(*row) for row in section["rows"]]
    parts = [
        f"## {section['title']}\n",
        section.get("before", ""),
        _make_table(titles, rows),
        section.get("after", ""),
    ]
    return "\n".join(part for part in parts if part)


def _complete(there: str, here: str, note: str) -> tuple[str, str, str]:
    """Returns a row. The error's answer replaces an empty note.

    Raises:
        KeyError: If no error answers the name.
    """
    if here == _NOT_THERE and not note:
        note = NAMES[there.strip("`")]
    return there, here, note


def _make_table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    PAGE.write_text(make_page())
