"""Text for people: sizes, durations and times in one form, and tables.

Each subcommand of `armillary` prints tables, or JSON with `--json`.
"""

import argparse
import datetime
import io
import json
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from armillary._checks import printable
from armillary._process import ExitCode

if TYPE_CHECKING:
    from rich.table import Table

# The width in a file or a pipe, where no path must be cut.
_FILE_WIDTH = 1000

_PREFIXES = {
    "T": 1e12,
    "G": 1e9,
    "M": 1e6,
    "k": 1e3,
    "": 1.0,
    "m": 1e-3,
    "u": 1e-6,
    "n": 1e-9,
}


def format_scaled(number: float | None, unit: str) -> str:
    """Returns a number with three digits and a prefix: `1.24 MB`, `3.5 ms`, `0 B`."""
    if not number:
        return f"0 {unit}"
    for prefix, scale in _PREFIXES.items():
        # Rounded to three digits, 0.9995 is 1.
        if number >= 0.9995 * scale:
            return f"{number / scale:.3g} {prefix}{unit}"
    return f"{number / 1e-9:.3g} n{unit}"


def format_bytes(number: float | None) -> str:
    """Returns a number of bytes with three digits, such as `1.24 MB`."""
    return format_scaled(number, "B")


def format_seconds(seconds: float) -> str:
    """Returns a duration, such as `12.5 s`, `12 s`, `1 min 5 s` or `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, left = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {left} s" if left else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def format_time(seconds: float | None) -> str:
    """Returns a time since the epoch as local time, to the minute; `""` for `None`."""
    if seconds is None:
        return ""
    return f"{datetime.datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--json`."""
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of a table"
    )


def print_json(value: Any) -> ExitCode:
    """Prints a value as JSON, with unknown types as strings."""
    from armillary._json_values import as_json

    sys.stdout.write(json.dumps(as_json(value), indent=2) + "\n")
    return ExitCode.OK


def make_table(
    head: Sequence[str],
    *sections: Iterable[Sequence[str]],
    numbers: Collection[str] = (),
    title: str | None = None,
) -> "Table":
    """Returns a table with lines between sections; columns in `numbers` align right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=any(head))
    for name in head:
        side = "right" if name in numbers else "left"
        table.add_column(Text(name), justify=side, overflow="fold")
    for rows in sections:
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        table.add_section()
    return table


def print_out(*parts: "Table | str") -> ExitCode:
    """Prints tables and lines of text."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    for part in parts:
        console.print(printable(part) if isinstance(part, str) else part)
    return ExitCode.OK


def as_text(table: "Table", width: int = 100) -> str:
    """Returns a table as the text of its lines, at most `width` characters wide."""
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, width=width, highlight=False, markup=False)
    console.print(table)
    return text.getvalue().rstrip("\n")
