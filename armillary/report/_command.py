"""The command lines of `armillary report`, `armillary runs` and `armillary goodput`.

The files of runs are read with modules that import JAX. They are imported when a
command runs, so that `--help` is quick.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary._checks import counted, printable
from armillary._format import add_json, format_time, make_table, print_json, print_out
from armillary._process import ExitCode

if TYPE_CHECKING:
    from armillary.goodput._journal import Goodput
    from armillary.report._run_files import RecordedRun

_LINE = 100  # Characters of a line.
_FEWEST = 24  # Characters of the column with the last values, at least.


def add_report(parser: argparse.ArgumentParser) -> None:
    help = "directory of a run, or of several runs to compare"
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help=help)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the page (default: report.html)",
    )


def prepare_report(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    """Checks the paths and makes the page; returns a function that writes it."""
    # Reading the runs may take long, so faults of the path are found first.
    output: Path = namespace.output
    if output.is_dir():
        raise ValueError(
            f"`--output` is {str(output)!r}, which is a directory, but it must be the "
            "name of a file. Use `--output report.html`."
        )
    above = next(folder for folder in output.absolute().parents if folder.exists())
    is_writable = above.is_dir() and os.access(above, os.W_OK)
    if not is_writable:
        raise ValueError(
            f"`--output` is {str(output)!r}, but `{above}` is not a directory in which "
            "this user may write. Name a file in another directory."
        )
    from armillary.report._page import make_page
    from armillary.report._run_files import read_runs

    runs = read_runs(namespace.run_dirs)
    try:
        page = make_page(runs)
    except ImportError as error:
        raise ValueError(str(error)) from error

    def write() -> ExitCode:
        output.parent.mkdir(parents=True, exist_ok=True)
        # A name of a file may hold bytes that are not UTF-8.
        output.write_text(page, encoding="utf-8", errors="backslashreplace")
        names = ", ".join(run.name for run in runs)
        return print_out(f"{output} shows {names}.")

    return write


def add_runs(parser: argparse.ArgumentParser) -> None:
    help = "directory with runs below it"
    parser.add_argument("directory", type=Path, metavar="DIR", help=help)
    add_json(parser)


def prepare_runs(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    from armillary.report._run_files import read_runs

    runs = read_runs([namespace.directory])
    if namespace.json:
        return lambda: print_json([_as_record(run) for run in runs])

    head = ["run", "began", "state", "step", "time", "goodput", "last values"]
    rows = [_as_row(run) for run in runs]
    # Each run has one line. The report and `--json` have the values that do not fit.
    room = _find_room(head, rows)
    for row, run in zip(rows, runs, strict=True):
        # The best checkpoint comes first, and one value after it.
        fewest = 1 if run.best is None else 2
        values = _last_values(run)
        row.append(_shorten(values, fewest, room))
    table = make_table(head, rows, numbers=["step", "time", "goodput"])
    return lambda: print_out(table)


def _find_room(head: list[str], rows: list[list[str]]) -> int:
    """Returns the number of characters for the last column, which no row has yet."""
    columns = zip(head[:-1], *rows, strict=True)
    num_taken = sum(max(map(len, cells)) for cells in columns)
    num_of_borders = 3 * len(head) + 1
    return max(_LINE - num_taken - num_of_borders, _FEWEST)


def _as_record(run: "RecordedRun") -> dict[str, Any]:
    """Returns the facts about a run that `--json` prints."""
    record: dict[str, Any] = {
        "run": run.name,
        "path": str(run.path),
        "began": run.began,
        "step": run.step,
        "state": run.state or None,
        "attempts": None,
        "seconds": None,
        "goodput": None,
        "best": None,
    }
    goodput = run.goodput
    if goodput is not None:
        record["attempts"] = goodput.num_attempts
        record["seconds"] = goodput.total_seconds
        record["goodput"] = goodput.goodput
    if run.best is not None:
        folder = str(run.best.saved.path)
        record["best"] = {"checkpoint": folder, **run.best.mark._asdict()}

    values: dict[str, float] = {}
    for (source, metric), points in run.curves.items():
        _, last = points[-1]
        values[f"{source}/{metric}"] = last
    record["values"] = values
    return record


def _as_row(run: "RecordedRun") -> list[str]:
    """Returns the cells of a run in the table, without its last values."""
    from armillary.report._page import goodput_cells, show_number

    _, time, goodput = goodput_cells(run)
    return [
        printable(run.name),
        format_time(run.began),
        run.state,
        show_number(run.step),
        time,
        goodput,
    ]


def _shorten(values: list[str], fewest: int, room: int) -> str:
    """Returns as many values as fit, and at least the fewest."""
    shown = ", ".join(values)
    for count in range(len(values) - 1, fewest - 1, -1):
        if len(shown) <= room:
            break
        shown = ", ".join([*values[:count], "..."])
    return shown


def _last_values(run: "RecordedRun") -> list[str]:
    """Returns the best checkpoint and the last values, evaluations before training."""
    from armillary.report._run_files import SPEEDS

    best: list[str] = []
    if run.best is not None:
        best.append(str(run.best))

    evaluations: list[str] = []
    training: list[str] = []
    for (source, metric), points in run.curves.items():
        if metric in SPEEDS:
            continue
        _, last = points[-1]
        values = training if source == "train" else evaluations
        values.append(printable(f"{source} {metric} {last:.4g}"))
    return best + evaluations + training


def add_goodput(parser: argparse.ArgumentParser) -> None:
    help = "directory of the run's checkpoints, or the one above it"
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=help)
    add_json(parser)


def prepare_goodput(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    from armillary.goodput._journal import read_goodput

    goodput = read_goodput(namespace.run_dir)
    if not namespace.json:
        return lambda: _print_goodput(goodput)
    record = {
        "goodput": goodput.goodput,
        "total_seconds": goodput.total_seconds,
        "seconds": goodput.seconds,
        "attempts": goodput.num_attempts,
        "steps": goodput.num_steps,
        "lost_steps": goodput.num_lost_steps,
        "stragglers": goodput.stragglers,
    }
    return lambda: print_json(record)


def _print_goodput(goodput: "Goodput") -> ExitCode:
    total = goodput.total_seconds
    divisor = total or 1.0  # Without any time, each share is 0.
    rows: list[tuple[str, str, str]] = []
    for category, seconds in goodput.seconds.items():
        share = seconds / divisor
        rows.append((category.label, f"{seconds:.1f}", f"{share:.1%}"))
    share_of_total = 1.0 if total else 0.0
    sums = [("total", f"{total:.1f}", f"{share_of_total:.1%}")]
    head = ["time", "seconds", "share"]
    table = make_table(head, rows, sums, numbers=["seconds", "share"])

    summary = (
        f"goodput {goodput.goodput:.1%}, {counted(goodput.num_attempts, 'attempt')}, "
        f"{counted(goodput.num_steps, 'step')}, "
        f"{counted(goodput.num_lost_steps, 'step')} lost"
    )
    return print_out(table, summary, *goodput.stragglers)
