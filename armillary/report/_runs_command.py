"""The command line of `armillary runs`."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from armillary._commands import add_json, make_table, print_json, print_out
from armillary._format import format_time
from armillary._process import ExitCode
from armillary.report._page import goodput_cells, number
from armillary.report._run_files import SPEED, Run, read_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `armillary runs`."""
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="directory with runs below it"
    )
    add_json(parser)


def prepare(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    """Reads the runs and returns what lists them."""
    runs = read_runs([namespace.directory])
    if namespace.json:
        return lambda: print_json([_describe(run) for run in runs])
    head = ["run", "began", "state", "step", "time", "goodput", "last values"]
    table = make_table(head, map(_as_row, runs), numbers=["step", "time", "goodput"])
    return lambda: print_out(table)


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


def _as_row(run: Run) -> list[str]:
    values = [
        f"{source} {metric} {points[-1][1]:.4g}"
        for (source, metric), points in run.curves.items()
        if metric != SPEED
    ]
    began, (_, *spent) = format_time(run.began), goodput_cells(run)
    return [run.name, began, run.state, number(run.step), *spent, "\n".join(values)]
