"""The environments of other libraries: where they are, and how they are made."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.contestants import PEERS
from benchmarks.processes import REPOSITORY

_LISTS = REPOSITORY / "benchmarks" / "peers"
_INSTALL_SECONDS = 1800


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
        path = _python_of(name, folder)
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


def make_environments(
    names: Sequence[str],
    folder: Path,
    run: Callable[..., "subprocess.CompletedProcess[str]"] = subprocess.run,
) -> dict[str, str]:
    """Makes the environments that are missing in a folder.

    Args:
        names: The peers.
        folder: Where the environments are, as `.venv-bench-NAME`.
        run: Runs a command, in the place of `subprocess.run` for tests.

    Returns:
        The reason for each peer that could not be installed. Its environment is made
        again the next time.
    """
    problems = {}
    for name in names:
        python = _python_of(name, folder)
        mark = python.parents[1] / "installed"
        if mark.exists():
            continue
        make = [sys.executable, "-m", "venv", "--clear", str(python.parents[1])]
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-qq"]
        # The lists are complete, so nothing else is installed.
        install = [*pip, "install", "--no-deps", "-r", str(_LISTS / f"{name}.txt")]
        reason = _run(make, run) or _run(install, run)
        if reason is None:
            mark.touch()
        else:
            problems[name] = reason
    return problems


def _run(
    command: list[str], run: Callable[..., "subprocess.CompletedProcess[str]"]
) -> str | None:
    """Runs a command; returns its last line if it failed."""
    try:
        ended = run(
            command,
            capture_output=True,
            check=False,
            text=True,
            timeout=_INSTALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"pip did not end within {_INSTALL_SECONDS} s."
    if ended.returncode == 0:
        return None
    lines = ended.stderr.strip().splitlines() or ["no message"]
    return lines[-1]


def _python_of(name: str, folder: Path) -> Path:
    return folder / f".venv-bench-{name}" / "bin" / "python"
