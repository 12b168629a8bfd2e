"""Which state of a git repository the program is, as far as git can say at once."""

import functools
import subprocess
from pathlib import Path
from typing import Any

_TIMEOUT_SECONDS = 5.0


@functools.cache
def read_git(folder: str) -> dict[str, Any] | None:
    """Returns the commit of a folder, and whether files that git knows have changed.

    It is `{"commit": ..., "dirty": ...}`, or `None` without git, without a repository
    or a commit, or if git takes more than five seconds. Of a process, the first answer
    counts.
    """
    # It takes no lock and starts no daemon. The commit comes first, then changed files.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "status"]
    command += ["--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        ended = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = ended.stdout.decode(errors="replace").splitlines()
    commit = next((line.split()[2] for line in lines if "branch.oid" in line), "")
    if not commit.isalnum():  # "(initial)": nothing is committed yet.
        return None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}


def find_program_folder() -> str:
    """Returns the folder of the program's main file, or the current one."""
    main = __import__("__main__")
    file = getattr(main, "__file__", None)
    return str(Path(file).resolve().parent if file else Path.cwd())
