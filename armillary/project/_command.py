"""The command line of `armillary new`."""

import argparse
import importlib.util
import keyword
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from armillary._process import ExitCode

_TEMPLATE = Path(__file__).parent / "template"
_SUFFIX = ".tmpl"
_PLACEHOLDER = "my_project"
_PACKAGE = "package"
# With longer names, lines of the template would become too long.
_MAX_LETTERS = 30


def check_new_folder(directory: Path) -> None:
    is_empty = directory.is_dir() and not any(directory.iterdir())
    if (directory.exists() or directory.is_symlink()) and not is_empty:
        what = "is not empty" if directory.is_dir() else "is not a directory"
        raise ValueError(
            f"`DIRECTORY` is {str(directory)!r}, which {what}, and no file is "
            "overwritten. Choose a directory that does not exist, or is empty."
        )
    name = directory.resolve().name
    problem = _find_problem(name)
    if problem is not None:
        raise ValueError(
            f"`DIRECTORY` is {str(directory)!r}, but its name, {name!r}, {problem}. "
            "Use lower-case letters, digits and underscores, such as "
            "`armillary new my_project`."
        )


def _find_problem(name: str) -> str | None:
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        return "cannot be the name of a Python package"
    if keyword.iskeyword(name):
        return "is a keyword of Python"
    if len(name) > _MAX_LETTERS:
        return f"is longer than {_MAX_LETTERS} letters"
    if name == "tests" or name in sys.stdlib_module_names:
        return "is the name of another package, which the program needs"
    spec = importlib.util.find_spec(name)
    # A namespace package is any folder, such as the new one itself.
    if spec is not None and spec.origin is not None:
        return f"is the name of a package that is installed already ({spec.origin})"
    return None


def write_project(directory: Path) -> list[Path]:
    name = directory.resolve().name
    written: list[Path] = []
    for file in sorted(_TEMPLATE.rglob(f"*{_SUFFIX}")):
        parts = file.relative_to(_TEMPLATE).parts
        target = directory.joinpath(*(name if p == _PACKAGE else p for p in parts))
        target = target.with_name(target.name.removesuffix(_SUFFIX))
        target.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text(encoding="utf-8").replace(_PLACEHOLDER, name)
        target.write_text(text, encoding="utf-8")
        written.append(target)
    return written


def add_new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIRECTORY",
        help="the new directory; the project's package has the same name",
    )


def prepare_new(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    directory: Path = namespace.directory
    check_new_folder(directory)
    return lambda: _run(directory)


def _run(directory: Path) -> ExitCode:
    num_files = len(write_project(directory))
    place = shlex.quote(str(directory))
    sys.stdout.write(
        f"Wrote {num_files} files to {directory}. Continue with:\n"
        f"  cd {place}\n"
        "  pip install -e . pytest  # in the environment where Armillary is installed\n"
        f"  python -m {directory.resolve().name}.main\n"
        "  python -m pytest\n"
        "  grep -rnI TODO . --exclude-dir=.venv\n"
    )
    return ExitCode.OK
