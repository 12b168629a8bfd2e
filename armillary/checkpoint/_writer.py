"""Saves in the background, and removes old checkpoints afterwards.

Saving is in two parts. `start` blocks until the arrays may change again, which is at
most a copy from device to host. A thread then waits until all of it is on the disk
and, only after that, removes what is superseded or expired: neither a failed save nor a
power cut costs an older checkpoint.
"""

import threading
from collections.abc import Sequence
from time import sleep, time

import jax
import numpy as np
from etils import epath

from armillary._logging import logger
from armillary._process import is_first
from armillary.checkpoint import _folder
from armillary.checkpoint._disk import sync_name
from armillary.checkpoint._exit import find_running, sync_at_exit
from armillary.checkpoint._leaf import Content, as_stored
from armillary.checkpoint._messages import as_disk_error, removal_error, write_error
from armillary.checkpoint._store import Store
from armillary.errors import CheckpointError

_REMOVAL_DELAYS = (0.0, 0.05, 0.2, 0.5)


class Writer:
    """Writes the checkpoints of one directory, one at a time.

    Args:
        directory: Where to. It is made by the first save.
        max_to_keep: How many of the newest stay, or `None` for all.
        keep_every_hours: See `find_expired`.
        raise_errors: Whether `start` and `sync` raise what kept a save from being
            written, or only log it.
    """

    def __init__(
        self,
        directory: epath.Path,
        *,
        max_to_keep: int | None,
        keep_every_hours: float | None,
        raise_errors: bool,
    ) -> None:
        self._directory = directory
        self._max_to_keep = max_to_keep
        self._keep_every_hours = keep_every_hours
        self._store = Store()
        self._preserved_at = time()
        self._has_cleaned = False
        self.thread: threading.Thread | None = None
        """What ends the last save, if `sync` has not seen the end of it."""
        self._raise_errors = raise_errors
        self._failure: CheckpointError | None = None
        self.last_error: CheckpointError | None = None
        """The error of the last save, or `None`."""

    def start(self, number: int, content: Content) -> str | None:
        """Starts a save. The last one must be over: call `sync` first."""
        self.last_error = None
        try:
            problem = _folder.find_problem(self._directory)
            if problem is not None:
                raise CheckpointError(problem)
            path, num_bytes = self._start(number, content)
        except CheckpointError as error:
            self.last_error = error
            if self._raise_errors:
                raise
            logger.warning("%s", error)
            return None
        sync_at_exit(self)
        self.thread = threading.Thread(
            target=self._finish, args=(path, num_bytes), name="armillary-checkpoint"
        )
        self.thread.start()
        return str(path)

    def sync(self) -> None:
        """Waits until the last save is on the disk and old checkpoints are removed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @property
    def has_failed(self) -> bool:
        """Whether `sync` has an error to raise."""
        return self._failure is not None

    def close(self) -> None:
        """Waits like `sync`, and ends the threads of Orbax. `start` makes new ones."""
        try:
            self.sync()
        finally:
            self._store.close()

    def _start(self, number: int, content: Content) -> tuple[epath.Path, int]:
        # The path and the size of the save that it starts.
        path = self._directory / f"checkpoint_{number}"
        num_bytes = None
        try:
            arrays = _as_arrays(content)
            num_bytes = sum(array.nbytes for array in arrays.values())
            self._prepare_directory()
            saved = _folder.find_checkpoints(self._directory)
            path = _folder.choose_path(self._directory, number, saved)
            specs = content.specs
            self._store.write(
                path,
                arrays=arrays,
                manifest={
                    "leaves": {name: spec.as_json() for name, spec in specs.items()},
                    "states": content.states,
                    "evaluation": content.evaluation,
                },
                header=self._make_header(number, saved, has_arrays=bool(arrays)),
                # Such as that of a model which this checkpoint says is the best.
                earlier=find_running(),
            )
            return path, num_bytes
        except Exception as error:
            self._clean_up(path)
            goes_on = not self._raise_errors
            failure = write_error(path, error, num_bytes, goes_on=goes_on)
            raise failure from _cause(error)

    def _clean_up(self, path: epath.Path) -> None:
        """Gives back the space of a save that failed."""
        self._store.abandon()
        # Orbax reports the first of its threads that fails. What another one still
        # writes is removed by the next try, or before the next save.
        self._has_cleaned = False
        for delay in _REMOVAL_DELAYS if is_first() else ():
            sleep(delay)
            try:
                _folder.remove_unfinished(path)
                return
            except OSError as error:
                logger.debug("Removing the rest of `%s` failed: %s", path, error)

    def _prepare_directory(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        # Not in the constructor: a manager that only reads must not remove the folder
        # that another process is writing.
        if not self._has_cleaned and is_first():
            _folder.remove_leftovers(self._directory)
        self._has_cleaned = True

    def _make_header(
        self, number: int, saved: Sequence[_folder.Saved], *, has_arrays: bool
    ) -> _folder.Header:
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

    def _finish(self, path: epath.Path, num_bytes: int) -> None:
        try:
            self._store.wait()
            # ORDER: before an older checkpoint goes.
            sync_name(path)
        except Exception as error:
            self._clean_up(path)
            goes_on = not self._raise_errors
            failure = write_error(path, error, num_bytes, goes_on=goes_on)
            self._report(failure, error)
            self.last_error = failure
            return
        try:
            if is_first():
                self._remove_old()
        except Exception as error:
            # Not in `last_error`: the checkpoint itself is written.
            self._report(removal_error(path, error), error)

    def _report(self, failure: CheckpointError, cause: Exception) -> None:
        """Has `sync` raise an error of the background, or logs it."""
        failure.__cause__ = _cause(cause)
        if self._raise_errors:
            self._failure = failure
        else:
            logger.warning("%s", failure)

    def _remove_old(self) -> None:
        # Listed again: what goes is decided by what is there once the save is complete.
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


def _cause(error: Exception) -> Exception | None:
    """Returns the error to be shown with ours: none of the disk, which ours repeats."""
    return None if as_disk_error(error) else error


def _as_arrays(content: Content) -> dict[str, jax.Array | np.ndarray]:
    specs = content.specs
    stored = content.stored or {
        name: _as_one_copy(as_stored(leaf)) for name, leaf in content.leaves.items()
    }
    return {name: array for name, array in stored.items() if not specs[name].is_empty}


def _as_one_copy(array: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Returns one replica of an array whose replicas share the host's memory.

    Orbax would cut it into a slice for each of them, by programs to be compiled. That
    serves devices of their own, which hand over their slices side by side.
    """
    if (
        isinstance(array, jax.Array)
        and array.is_fully_addressable
        and array.is_fully_replicated
        and all(device.platform == "cpu" for device in array.devices())
    ):
        return array.addressable_data(0)
    return array
