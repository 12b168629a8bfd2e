"""The command line of `armillary report`."""

import argparse
from collections.abc import Callable
from pathlib import Path

from armillary._commands import print_out
from armillary._process import ExitCode
from armillary.report._page import make_page
from armillary.report._run_files import read_runs


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
    parser.add_argument(
        "--with-command",
        action="store_true",
        help="show the command lines too, which may hold passwords",
    )


def prepare(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    """Reads the runs and returns what writes the page."""
    output: Path = namespace.output
    if output.is_dir():
        raise ValueError(
            f"`--output` is {str(output)!r}, which is a directory, but it must be the "
            "name of a file. Use `--output report.html`."
        )
    runs = read_runs(namespace.run_dirs)
    try:
        page = make_page(runs, with_command=namespace.with_command)
    except ImportError as error:
        raise ValueError(str(error)) from error

    def write() -> ExitCode:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page, encoding="utf-8", errors="backslashreplace")
        return print_out(f"{output} shows {', '.join(run.name for run in runs)}.")

    return write
