"""What writers to services share: one run for all, which goes on when it is resumed."""

import abc
import importlib
import os
import uuid
from pathlib import Path
from typing import Any


class Service(abc.ABC):
    """Makes writers to one run of a service, which ends with the last of them."""

    _writer_type: "type[ServiceWriter]"

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._run_dir = Path(os.path.abspath(run_dir))
        self._num_writers = 0

    def __call__(self, directory: str) -> "ServiceWriter":
        """Returns the writer of one directory."""
        prefix = _find_prefix(self._run_dir, directory)
        if not self._num_writers:
            self._begin()
        self._num_writers += 1
        return self._writer_type(self, prefix)

    @abc.abstractmethod
    def flush(self) -> None:
        """Sends the values."""

    def close(self) -> None:
        """Ends the run with the last of its writers."""
        self.flush()
        self._num_writers -= 1
        if not self._num_writers:
            self._end()

    @abc.abstractmethod
    def _begin(self) -> None: ...

    @abc.abstractmethod
    def _end(self) -> None: ...


class ServiceWriter:
    """Writes the summaries of one directory."""

    def __init__(self, service: Any, prefix: str) -> None:
        self._service, self._prefix = service, prefix
        self.flush, self.close = service.flush, service.close
        self.hyperparameters = service.configure

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Writes one value."""
        self._log(tag, value, step)

    def _log(self, tag: str, value: Any, step: int) -> None:
        self._service.log(self._prefix + tag, value, step)


def read_id(path: Path) -> str | None:
    """Returns what an earlier attempt has kept, or `None`."""
    return path.read_text().strip() or None if path.is_file() else None


def keep_id(path: Path, run_id: str) -> None:
    """Keeps a name for the next attempt, which finds it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    unfinished.write_text(run_id + "\n")
    unfinished.replace(path)


def _find_prefix(run_dir: Path, directory: str) -> str:
    # What the names of a directory of summaries begin with.
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
    """Returns the package of a service."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{title} is not installed. Install it with "
            f'`pip install "armillary[{extra}]"`.'
        ) from error
