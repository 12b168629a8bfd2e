"""What the subcommands of `armillary` share: their results, as a table or as JSON.

A subcommand is two functions of a module `_command`. `add_<name>` adds its arguments to
a parser. `prepare_<name>` checks the values, raises `ValueError` for a wrong one, and
returns what to run.
"""

import argparse
import io
import json
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from armillary._checks import printable
from armillary._process import ExitCode

if TYPE_CHECKING:
    from rich.table import Table

# In a file or a pipe, no path is cut.
_FILE_WIDTH = 1000


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--json`."""
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of a table"
    )


def print_json(value: Any) -> ExitCode:
    """Prints a value, with what JSON does not know as strings."""
    from armillary._records import as_json

    sys.stdout.write(json.dumps(as_json(value), indent=2) + "\n")
    return ExitCode.OK


def make_table(
    head: Sequence[str],
    *sections: Iterable[Sequence[str]],
    numbers: Collection[str] = (),
    title: str | None = None,
) -> "Table":
    """Returns a table, with lines between sections, and some columns to the right."""
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
    Console(file=text, width=width, highlight=False, markup=False).print(table)
    return text.getvalue().rstrip("\n")
