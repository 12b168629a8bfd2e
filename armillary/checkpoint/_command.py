"""The command line of `armillary checkpoint`."""

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from armillary._checks import counted, printable
from armillary._exit_code import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

# In a file or a pipe, no path is cut.
_FILE_WIDTH = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `armillary checkpoint`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="print what is inside",
        description="Print what is inside a checkpoint, or a directory of them.",
        allow_abbrev=False,
    )
    show.add_argument(
        "path",
        metavar="PATH",
        help="a checkpoint, or the directory of a `CheckpointManager`",
    )
    show.add_argument(
        "--json", action="store_true", help="print JSON instead of tables"
    )


def prepare(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    """Reads the checkpoint and returns what prints it."""
    import jax

    from armillary.checkpoint._contents import describe
    from armillary.checkpoint._folder import as_absolute

    # A program that trains on this machine has the other devices for itself.
    jax.config.update("jax_platforms", "cpu")
    contents = describe(as_absolute("path", namespace.path))
    show = _print_json if namespace.json else _print_tables
    return lambda: show(contents)


def _print_json(contents: dict[str, Any]) -> ExitCode:
    from armillary._numbers import as_json

    sys.stdout.write(json.dumps(as_json(contents), indent=2) + "\n")
    return ExitCode.OK


def _print_tables(contents: dict[str, Any]) -> ExitCode:
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    (_print_directory if "directory" in contents else _print_one)(console, contents)
    return ExitCode.OK


def _print_one(console: "Console", contents: dict[str, Any]) -> None:
    from rich.table import Column, Table

    leaves = contents["leaves"]
    table = Table(Column("path", overflow="fold"), "dtype", "shape")
    table.add_column("bytes", justify="right")
    table.add_column("value", justify="right")
    parts = itertools.groupby(sorted(leaves), key=lambda name: name.split("/")[0])
    for part, group in parts:
        names = list(group)
        total = sum(leaves[name]["bytes"] for name in names)
        for name in names:
            leaf = leaves[name]
            shape = str(tuple(leaf["shape"]))
            size, value = f"{leaf['bytes']:,}", str(leaf.get("value", ""))
            row = (name, leaf["dtype"], shape, size, value)
            table.add_row(*map(printable, row))
        if names != [part]:
            table.add_section()
            title = printable(f"{part}: {counted(len(names), 'array')}")
            table.add_row(title, "", "", f"{total:,}")
        table.add_section()
    path = printable(contents["path"])
    console.print(f"{path}: step {contents['number']}, {_when(contents)}")
    console.print(table)
    for name, state in sorted(contents["states"].items()):
        console.print(f"{printable(name)}: {json.dumps(state)}")


def _print_directory(console: "Console", contents: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("checkpoint")
    table.add_column("step", justify="right")
    table.add_column("saved")
    table.add_column("bytes", justify="right")
    table.add_column("best")
    for entry in contents["checkpoints"]:
        best = (f"{name} {value:.6g}" for name, value in entry["best_values"].items())
        table.add_row(
            printable(entry["path"].rpartition("/")[2]),
            str(entry["number"]),
            _when(entry),
            f"{entry['bytes_on_disk']:,}",
            printable(", ".join(best)),
        )
    console.print(printable(contents["directory"]))
    console.print(table)
    for path, reason in contents["broken"].items():
        console.print(printable(f"{path}: {reason}"))
    for path in contents["unfinished"]:
        problem = "is not complete: a save was interrupted, or goes on"
        console.print(f"{printable(path)} {problem}")


def _when(entry: dict[str, Any]) -> str:
    return f"{datetime.fromtimestamp(entry['saved_at'], UTC):%Y-%m-%d %H:%M:%S} UTC"
