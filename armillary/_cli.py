"""The command `armillary`: one subcommand for each thing done around a run.

A subcommand is two functions: one adds its arguments to a parser, one checks their
values and returns what to run. A wrong argument is a `ValueError` of the second one,
which ends as one line on stderr and as `ExitCode.USAGE`.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

from armillary import __version__
from armillary._exit_code import ExitCode
from armillary.goodput import _command as goodput
from armillary.launch import _arguments as launch
from armillary.plan import _command as plan
from armillary.project import _command as project


class _Command(NamedTuple):
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    prepare: Callable[[argparse.Namespace], Callable[[], ExitCode]]


_COMMANDS = {
    "launch": _Command(
        "start the workers of a job, here or on a Ray cluster, and restart it",
        launch.add_arguments,
        launch.prepare,
    ),
    "goodput": _Command(
        "show where the time of a run went, across restarts",
        goodput.add_arguments,
        goodput.prepare,
    ),
    "plan": _Command(
        "compile a training step for devices that are not there",
        plan.add_arguments,
        plan.prepare,
    ),
    "new": _Command(
        "write a small project to begin with",
        project.add_arguments,
        project.prepare,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        arguments: The words after `armillary`; `None` takes those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="armillary",
        description="Tools around a training run.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"armillary {__version__}"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            allow_abbrev=False,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(subcommand=command, subparser=subparser)
    namespace, unknown = parser.parse_known_args(arguments)
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
        run = namespace.subcommand.prepare(namespace)
    except ValueError as error:
        subparser.error(str(error))
    return run()
