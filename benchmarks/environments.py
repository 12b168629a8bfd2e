"""The environments of other libraries: where they are, and how they are made."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.contestants import PEERS
from benchmarks.processes import REPOSITORY

_PREFIX = ".venv-bench-"


def find_pythons(given: Sequence[str], folder: Path = REPOSITORY) -> dict[str, str]:
    """Returns the interpreters of the peers that have an environment.

    Args:
        given: Entries `NAME=PATH`; other peers are looked for in the folder.
        folder: Where the environments are, as `.venv-bench-NAME`.

    Raises:
        SystemExit: If an entry is malformed or names no peer.
    """
    found = {}
    for name in PEERS:
        path = folder / f"{_PREFIX}{name}" / "bin" / "python"
        if path.exists():
            found[name] = str(path)
    for entry in given:
        name, _, path = entry.partition("=")
        if name not in PEERS or not path:
            raise SystemExit(
                f"`--peer-python` is {entry!r}, but it must be NAME=PATH with one of "
                f"{', '.join(PEERS)}, as in `--peer-python orbit=venv/bin/python`."
            )
        found[name] = path
    return found
