"""The name that a service knows a run by, kept in the directory of the run."""

import importlib
import os
import uuid
from pathlib import Path
from typing import Any


def read_id(path: Path) -> str | None:
    """Returns what an earlier attempt has kept, or `None`."""
    return path.read_text().strip() or None if path.is_file() else None


def keep_id(path: Path, run_id: str) -> None:
    """Keeps a name for the next attempt, which finds it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    unfinished.write_text(run_id + "\n")
    unfinished.replace(path)


def find_prefix(run_dir: Path, directory: str) -> str:
    """Returns what the names of a directory of summaries begin with.

    Args:
        run_dir: The directory of the run.
        directory: The one of the summaries, in it.

    Raises:
        ValueError: If it lies elsewhere.
    """
    own = Path(os.path.abspath(directory))
    if not own.is_relative_to(run_dir):
        raise ValueError(
            f"`run_dir` is {str(run_dir)!r}, but summaries are written to "
            f"{directory!r}, which is not in it. Use the directory of the run, above "
            "all of its summaries, as `run_dir`."
        )
    prefix = own.relative_to(run_dir).as_posix()
    return "" if prefix == "." else f"{prefix}/"


def import_service(module: str, title: str, extra: str) -> Any:
    """Returns the package of a service.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{title} is not installed. Install it with "
            f'`pip install "armillary[{extra}]"`.'
        ) from error
