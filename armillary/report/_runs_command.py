"""The command line of `armillary runs`."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from armillary._checks import printable
from armillary._process import ExitCode
from armillary._records import as_json
from armillary.report._run_files import SPEED, Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `armillary runs`."""
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="directory with runs below it"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of a table"
    )


def prepare(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    """Reads the runs and returns what lists them."""
    from armillary.report._run_files import read_runs

    runs = read_runs([namespace.directory])
    show = _print_json if namespace.json else _print_table
    return lambda: show(runs)


def _print_json(runs: Sequence[Run]) -> ExitCode:
    sys.stdout.write(
        json.dumps(as_json([_describe(run) for run in runs]), indent=2) + "\n"
    )
    return ExitCode.OK


def _describe(run: Run) -> dict[str, Any]:
    goodput = run.goodput
    return {
        "run": run.name,
        "path": str(run.path),
        "began": run.began,
        "last_sign": run.last_sign,
        "step": run.step,
        "state": run.state or None,
        "attempts": None if goodput is None else goodput.num_attempts,
        "seconds": None if goodput is None else goodput.total_seconds,
        "goodput": None if goodput is None else goodput.goodput,
        "values": {
            f"{source}/{metric}": points[-1][1]
            for (source, metric), points in run.curves.items()
        },
    }


def _print_table(runs: Sequence[Run]) -> ExitCode:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from armillary.report._page import goodput_cells, number, time_of_day

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("run", overflow="fold", min_width=8)
    for name in ("began", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "time", "goodput"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("last values", overflow="fold")
    for run in runs:
        _, time, goodput = goodput_cells(run)
        values = [
            f"{source} {metric} {points[-1][1]:.4g}"
            for (source, metric), points in run.curves.items()
            if metric != SPEED
        ]
        cells = (
            run.name,
            time_of_day(run.began),
            run.state,
            number(run.step),
            time,
            goodput,
            "\n".join(values),
        )
        table.add_row(*map(printable, cells))
    Console(highlight=False, markup=False).print(table)
    return ExitCode.OK
