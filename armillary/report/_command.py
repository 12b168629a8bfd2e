"""The command line of `armillary report`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from armillary._checks import printable
from armillary._process import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `armillary report`."""
    parser.add_argument(
        "run_dirs",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="directory of a run, or one above several; they stand side by side",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the page (default: report.html)",
    )


def prepare(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    """Reads the runs and returns what writes the page."""
    from armillary.report._page import make_page
    from armillary.report._run_files import read_runs

    output: Path = namespace.output
    if output.is_dir():
        raise ValueError(
            f"`--output` is {str(output)!r}, which is a directory, but it must be the "
            "name of a file. Use `--output report.html`."
        )
    runs = read_runs(namespace.run_dirs)
    try:
        page = make_page(runs)
    except ImportError as error:
        raise ValueError(str(error)) from error

    def write() -> ExitCode:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page, encoding="utf-8", errors="backslashreplace")
        names = ", ".join(run.name for run in runs)
        sys.stdout.write(printable(f"{output} shows {names}.") + "\n")
        return ExitCode.OK

    return write
