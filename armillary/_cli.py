"""The command `armillary`: one subcommand for each thing done around a run.

A subcommand is two functions: one adds its arguments to a parser, one checks their
values and returns what to run. A wrong argument is a `ValueError` of the second one,
which ends as one line on stderr and as `ExitCode.USAGE`.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from armillary import __version__
from armillary._process import ExitCode


class _Command(NamedTuple):
    summary: str
    module: str  # It has `add_arguments` and `prepare`.


_COMMANDS = {
    "launch": _Command(
        "start the workers of a job, here or on a Ray cluster, and restart it",
        "armillary.launch._command",
    ),
    "goodput": _Command(
        "show where the time of a run went, across restarts",
        "armillary.goodput._command",
    ),
    "checkpoint": _Command(
        "show what is inside checkpoints",
        "armillary.checkpoint._command",
    ),
    "report": _Command(
        "write a page with the curves of a run, or of several",
        "armillary.report._command",
    ),
    "runs": _Command(
        "list runs: how far they came, and how well",
        "armillary.report._runs_command",
    ),
    "plan": _Command(
        "compile a training step for devices that are not there",
        "armillary.plan._command",
    ),
    "new": _Command(
        "write a small project to begin with",
        "armillary.project._command",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="armillary",
        description="Tools around a training run.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"armillary {__version__}"
    )
    words = sys.argv[1:] if arguments is None else arguments
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            allow_abbrev=False,
        )
        if name in words:  # The launcher does without the modules of the others.
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(prepare=module.prepare, subparser=subparser)
    namespace, unknown = parser.parse_known_args(words)
    subparser: argparse.ArgumentParser = getattr(namespace, "subparser", parser)
    if unknown:
        subparser.error(
            f"{' '.join(unknown)!r} is not an option of this command. Use one that "
            f"`{subparser.prog} --help` lists."
        )
    if subparser is parser:
        parser.print_help()
        return ExitCode.OK
    try:
        run = namespace.prepare(namespace)
    except ValueError as error:
        subparser.error(str(error))
    return run()
