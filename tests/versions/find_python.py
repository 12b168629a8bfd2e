"""Prints the path of a Python on this machine, or nothing if there is none.

JAX 0.11 and later need Python 3.12, so there are two sets of newest releases. `other`
prints a Python that has the other set than the Python that runs this program. `newest`
prints the newest Python that Armillary supports::

    python tests/versions/find_python.py other
"""

import shutil
import subprocess
import sys
from pathlib import Path

MINORS = (14, 13, 12, 11)
"""The releases of Python that the tests may run with, the newest first."""

VERSION = "import sys; print(*sys.version_info[:3])"
# Armillary needs a later 3.12: docs/internals/private_apis.md says why.
UNSUPPORTED = [(3, 12, 0), (3, 12, 1), (3, 12, 2)]


def find_candidates(minor: int) -> list[str]:
    """Returns commands that may be a Python of a minor version."""
    on_path = shutil.which(f"python3.{minor}")
    of_pyenv = Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")
    return [*filter(None, [on_path]), *sorted(map(str, of_pyenv), reverse=True)]


def is_usable(command: str, minor: int) -> bool:
    """Returns whether a command is a supported Python that can make environments."""
    # The command of pyenv on the path fails if that version is not selected.
    answer = subprocess.run(
        [command, "-c", f"import ensurepip, venv; {VERSION}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    version = tuple(map(int, answer.stdout.split()))
    return version[:2] == (3, minor) and version not in UNSUPPORTED


def main(which: str) -> None:
    """Prints the first Python that fits."""
    is_later = sys.version_info >= (3, 12)
    for minor in MINORS:
        has_other_set = (minor >= 12) != is_later
        if which == "other" and not has_other_set:
            continue
        for command in find_candidates(minor):
            if is_usable(command, minor):
                print(command)
                return


if __name__ == "__main__":
    main(sys.argv[1])
