"""The command line of `armillary new`."""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from armillary._exit_code import ExitCode
from armillary.project._template import check_target, write_project


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `armillary new`."""
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIRECTORY",
        help="the new directory; its name is that of the project's package",
    )


def prepare(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    """Checks the directory and returns what writes the project."""
    directory: Path = namespace.directory
    check_target(directory)
    return lambda: _run(directory)


def _run(directory: Path) -> ExitCode:
    num_files = len(write_project(directory))
    place = shlex.quote(str(directory))
    sys.stdout.write(
        f"Wrote {num_files} files to {directory}. Go on with:\n"
        f"  cd {place}\n"
        f"  python -m {directory.resolve().name}.main\n"
        "  python -m pytest\n"
        "  grep -rn TODO .\n"
    )
    return ExitCode.OK
