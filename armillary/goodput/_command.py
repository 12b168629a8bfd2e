"""The command line of `armillary goodput`."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from armillary._checks import counted
from armillary._process import ExitCode
from armillary.goodput._goodput import Goodput, read_goodput
from armillary.goodput._stopwatch import LABELS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `armillary goodput`."""
    parser.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="directory of the run's checkpoints, or the one above it",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of a table"
    )


def prepare(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    """Reads the record and returns what prints it."""
    goodput = read_goodput(namespace.run_dir)
    print_goodput = _print_json if namespace.json else _print_table
    return lambda: print_goodput(goodput)


def _print_json(goodput: Goodput) -> ExitCode:
    record = {
        "goodput": goodput.goodput,
        "total_seconds": goodput.total_seconds,
        "seconds": goodput.seconds,
        "attempts": goodput.num_attempts,
        "steps": goodput.num_steps,
        "lost_steps": goodput.num_lost_steps,
        "unreadable_lines": goodput.unreadable_lines,
    }
    sys.stdout.write(json.dumps(record, indent=2) + "\n")
    return ExitCode.OK


def _print_table(goodput: Goodput) -> ExitCode:
    from rich.console import Console
    from rich.table import Table

    total = goodput.total_seconds
    table = Table()
    table.add_column("time")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for category, label in LABELS.items():
        seconds = goodput.seconds[category]
        table.add_row(label, f"{seconds:.1f}", f"{seconds / (total or 1):.1%}")
    table.add_section()
    table.add_row("total", f"{total:.1f}", f"{bool(total):.1%}")
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"goodput {goodput.goodput:.1%}, {counted(goodput.num_attempts, 'attempt')}, "
        f"{counted(goodput.num_steps, 'step')}, "
        f"{counted(goodput.num_lost_steps, 'step')} lost"
    )
    if goodput.unreadable_lines:
        numbers = ", ".join(map(str, goodput.unreadable_lines))
        console.print(
            "Lines that could not be read, as a crash or a full disk leaves them: "
            f"{numbers}."
        )
    return ExitCode.OK
