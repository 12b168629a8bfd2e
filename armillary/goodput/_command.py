"""The command line of `armillary goodput`."""

import argparse
from collections.abc import Callable
from pathlib import Path

from armillary._checks import counted
from armillary._commands import add_json, make_table, print_json, print_out
from armillary._process import ExitCode
from armillary.goodput._goodput import Goodput, read_goodput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `armillary goodput`."""
    parser.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="directory of the run's checkpoints, or the one above it",
    )
    add_json(parser)


def prepare(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    """Reads the record and returns what prints it."""
    goodput = read_goodput(namespace.run_dir)
    if not namespace.json:
        return lambda: _print(goodput)
    record = {
        "goodput": goodput.goodput,
        "total_seconds": goodput.total_seconds,
        "seconds": goodput.seconds,
        "attempts": goodput.num_attempts,
        "steps": goodput.num_steps,
        "lost_steps": goodput.num_lost_steps,
        "unreadable_lines": goodput.unreadable_lines,
    }
    return lambda: print_json(record)


def _print(goodput: Goodput) -> ExitCode:
    total = goodput.total_seconds
    rows = [
        (category.label, f"{seconds:.1f}", f"{seconds / (total or 1):.1%}")
        for category, seconds in goodput.seconds.items()
    ]
    head = ["time", "seconds", "share"]
    sums = [("total", f"{total:.1f}", f"{bool(total):.1%}")]
    lines = [
        f"goodput {goodput.goodput:.1%}, {counted(goodput.num_attempts, 'attempt')}, "
        f"{counted(goodput.num_steps, 'step')}, "
        f"{counted(goodput.num_lost_steps, 'step')} lost"
    ]
    if goodput.unreadable_lines:
        numbers = ", ".join(map(str, goodput.unreadable_lines))
        lines.append(f"Lines that a crash or a full disk has spoilt: {numbers}.")
    return print_out(make_table(head, rows, sums, numbers=head[1:]), *lines)
