"""The command `armillary`, with one subcommand for each task around a run.

A subcommand is two functions of a module `_command`. `add_<name>` adds its arguments to
a parser. `prepare_<name>` checks the values and returns a function to run. If it raises
a `ValueError`, the command prints one line on stderr and exits with `ExitCode.USAGE`.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from armillary import __version__
from armillary._process import ExitCode

_COMMANDS = {
    "launch": "start the workers of a job, here or on a Ray cluster, and restart it",
    "goodput": "show where the time of a run went, across restarts",
    "checkpoint": "show what is inside checkpoints",
    "report": "write a page with the curves of a run, or of several",
    "runs": "list runs: how far they came, and how well",
    "plan": "compile a training step for devices that are not there",
    "new": "write a small project to begin with",
}
# The packages of commands that are not in a package of the same name.
_PACKAGES = {"runs": "report", "goodput": "report", "new": "project"}


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
    for name, summary in _COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            allow_abbrev=False,
        )
        if name in words:  # So the launcher does not import the other commands.
            package = _PACKAGES.get(name, name)
            module = importlib.import_module(f"armillary.{package}._command")
            getattr(module, f"add_{name}")(subparser)
            prepare = getattr(module, f"prepare_{name}")
            subparser.set_defaults(prepare=prepare, subparser=subparser)
    namespace, unknown = parser.parse_known_args(words)
    subparser: argparse.ArgumentParser = getattr(namespace, "subparser", parser)
    if unknown:
        problem = "is left over, because this command takes fewer arguments"
        if any(word.startswith("-") for word in unknown):
            problem = "is not an option of this command"
        subparser.error(
            f"{' '.join(unknown)!r} {problem}. Use what `{subparser.prog} --help` "
            "lists."
        )
    if subparser is parser:
        parser.print_help()
        return ExitCode.OK
    try:
        run = namespace.prepare(namespace)
    except ValueError as error:
        subparser.error(str(error))
    return run()
