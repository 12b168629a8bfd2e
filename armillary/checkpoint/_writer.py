"""Saves in the background, and removes old checkpoints afterwards.

Saving is in two parts. `start` blocks until the arrays may change again, which is at
most a copy from device to host. A thread then waits for the commit and, only after it,
removes what is superseded or expired, so a failed save costs no older checkpoint. The
versions of Python named in `_exit` cannot finish that at the end of a program, so with
them `start` waits for it.
"""

import threading
from time import time

import jax
from etils import epath

from armillary.checkpoint import _folder
from armillary.checkpoint._checkpoint import Content
from armillary.checkpoint._directory import find_problem, write_error
from armillary.checkpoint._exit import CAN_FINISH_AT_EXIT, sync_at_exit
from armillary.checkpoint._leaf import as_stored
from armillary.checkpoint._store import Store
from armillary.errors import CheckpointError


class Writer:
    """Writes the checkpoints of one directory, one at a time.

    Args:
        directory: Where to. It is made by the first save.
        max_to_keep: How many of the newest stay, or `None` for all.
        keep_every_hours: See `find_expired`.
    """

    def __init__(
        self,
        directory: epath.Path,
        *,
        max_to_keep: int | None,
        keep_every_hours: float | None,
    ) -> None:
        self._directory = directory
        self._max_to_keep = max_to_keep
        self._keep_every_hours = keep_every_hours
        self._store = Store()
        self._preserved_at = time()
        self._has_cleaned = False
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    def start(self, number: int, content: Content) -> str:
        """Starts a save and returns the path it is going to have.

        Args:
            number: The number in the name of the folder.
            content: What to save. The arrays may change once this returns.

        Raises:
            CheckpointError: If it cannot be written, or the last save could not be.
        """
        self.sync()
        problem = find_problem(self._directory)
        if problem is not None:
            raise CheckpointError(problem)
        path = self._start(number, content)
        sync_at_exit(self)
        self._thread = threading.Thread(
            target=self._finish, args=(path,), name="armillary-checkpoint"
        )
        self._thread.start()
        if not CAN_FINISH_AT_EXIT:
            self._thread.join()
        return str(path)

    def sync(self) -> None:
        """Waits until the last save is complete and old checkpoints are removed.

        Raises:
            CheckpointError: If that save failed. It is raised once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Waits like `sync`, and ends the threads of Orbax. `start` makes new ones."""
        try:
            self.sync()
        finally:
            self._store.close()

    def _start(self, number: int, content: Content) -> epath.Path:
        try:
            self._prepare_directory()
            path = _folder.choose_path(self._directory, number)
            self._write(path, number, content)
            return path
        except Exception as error:
            path = self._directory / f"checkpoint_{number}"
            raise write_error(path, error) from error

    def _prepare_directory(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        # Not in the constructor: a manager that only reads must not remove the folder
        # that another process is writing.
        if not self._has_cleaned and jax.process_index() == 0:
            _folder.remove_leftovers(self._directory)
        self._has_cleaned = True

    def _write(self, path: epath.Path, number: int, content: Content) -> None:
        specs = content.specs
        arrays = {
            name: as_stored(leaf)
            for name, leaf in content.leaves.items()
            if not specs[name].is_empty
        }
        self._store.write(
            path,
            arrays=arrays,
            manifest={
                "leaves": {name: spec.as_json() for name, spec in specs.items()},
                "states": content.states,
            },
            header=self._make_header(number, has_arrays=bool(arrays)),
        )

    def _make_header(self, number: int, *, has_arrays: bool) -> _folder.Header:
        saved = _folder.find_checkpoints(self._directory)
        last = saved[-1].header if saved else None
        if last is not None:
            # A restarted run goes on from what the run before it kept.
            self._preserved_at = last.preserved_at
        # Rising strictly, also when a clock is set back, because ages are compared.
        earliest = max(self._preserved_at, last.saved_at if last else 0.0) + 1e-3
        return _folder.Header(
            number=number,
            serial=last.serial + 1 if last else 1,
            saved_at=max(time(), earliest),
            preserved_at=self._preserved_at,
            has_arrays=has_arrays,
        )

    def _finish(self, path: epath.Path) -> None:
        try:
            self._store.wait()
            if jax.process_index() == 0:
                self._remove_old()
        except Exception as error:
            self._failure = write_error(path, error)
            self._failure.__cause__ = error

    def _remove_old(self) -> None:
        saved = _folder.find_checkpoints(self._directory)
        superseded = _folder.find_superseded(saved)
        expired, self._preserved_at = _folder.find_expired(
            [entry for entry in saved if entry not in superseded],
            max_to_keep=self._max_to_keep,
            keep_every_hours=self._keep_every_hours,
            preserved_at=self._preserved_at,
        )
        for entry in (*superseded, *expired):
            _folder.remove(entry.path)
