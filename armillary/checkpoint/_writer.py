"""Saves in the background, and removes old checkpoints afterwards.

Saving is in two parts. `start` blocks until the arrays may change again, which is at
most a copy from device to host. A thread then waits until all of it is on the disk
and, only after that, removes what is superseded or expired: neither a failed save nor a
power cut costs an older checkpoint.

Finishes saves when a program ends right after it started one.

Saving and restoring where several processes train together.

Process 0 alone writes, and chooses paths. Of mirrored state it has all; arrays that are
divided between processes travel to it, one after the other. The others learn what it
did. Where it fails with a `CheckpointError`, all raise that error; nobody is left
waiting, and a program that handles it can go on. All see one directory.

Each process judges whether a checkpoint is good, because each reads it: a cache or a
disk may show one of them something else. What one refuses, nobody restores: processes
that restored different ones would train a mixture.
"""

import contextlib
import dataclasses
import hashlib
import json
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from time import sleep, time
from typing import Any, TypeVar

import jax
import numpy as np
from etils import epath

from armillary._logging import logger
from armillary._process import is_first
from armillary.checkpoint import _folder
from armillary.checkpoint._checksums import CHECKSUM_FILE, find_damage, sync_name
from armillary.checkpoint._folder import Header, find_checkpoints, read_header
from armillary.checkpoint._leaf import Content, as_stored, as_stored_by_one
from armillary.checkpoint._selection import as_disk_error, removal_error, write_error
from armillary.checkpoint._store import Store
from armillary.cluster._join import get_peers
from armillary.cluster._peers import Peers
from armillary.errors import CheckpointError
from armillary.lifeline._ending import finish_first

_writers: "weakref.WeakSet[Writer]" = weakref.WeakSet()
_lock = threading.Lock()
_is_registered = False


def sync_at_exit(writer: "Writer") -> None:
    """Makes the interpreter call `writer.sync` before it ends.

    Call it after the save has started.
    """
    global _is_registered
    with _lock:
        _writers.add(writer)
        if not _is_registered:
            # `atexit` runs too late: by then no executor takes work any more, and the
            # save that is running would be lost (python/cpython#148280). Executors are
            # closed by a hook of this same kind. Hooks run last in, first out, and
            # theirs is older: a save that has started has imported them. In Python
            # 3.12.0 to 3.12.2 no hook can wait for a save, because no thread starts
            # once the main one has ended (python/cpython#113964), so `pyproject.toml`
            # excludes them.
            threading._register_atexit(_sync_all)  # pyright: ignore[reportAttributeAccessIssue]
            # The save also completes if the process ends because another one is gone.
            finish_first(_is_writing)
            _is_registered = True


def find_running() -> list[threading.Thread]:
    """Returns the threads of the saves that are not complete yet, of any directory."""
    threads = [writer.thread for writer in list(_writers)]
    return [thread for thread in threads if thread is not None and thread.is_alive()]


def _is_writing() -> bool:
    return bool(find_running())


def _sync_all() -> None:
    for writer in list(_writers):
        try:
            writer.sync()
        except CheckpointError as error:
            logger.error("%s", error)


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


T = TypeVar("T")


def announcing_errors() -> contextlib.AbstractContextManager[None]:
    """Returns a context whose errors the other processes, if any, hear of."""
    peers = get_peers()
    return contextlib.nullcontext() if peers is None else peers.announcing_errors()


def decide(topic: str, function: Callable[[], T], peers: Peers | None) -> T:
    """Returns on every process what `function` returns on process 0.

    All processes must call it, and it must return what JSON can hold.
    """
    if peers is None:
        return function()
    value = problem = None
    if peers.index == 0:
        with peers.announcing_errors():
            try:
                value = function()
            except CheckpointError as error:
                problem = error
    said = [value, None if problem is None else str(problem)]
    value, text = json.loads(peers.gather(topic, json.dumps(said))[0])
    if text is not None:
        raise problem or CheckpointError(text)
    return value


def merge_refusals(refused: dict[str, str], peers: Peers | None) -> dict[str, str]:
    """Returns what any process says, by name. All processes must call it."""
    if peers is None:
        return refused
    said = peers.gather("states that do not fit", json.dumps(refused))
    return {name: text for each in said for name, text in json.loads(each).items()}


def verify(
    chosen: epath.Path | None, directory: epath.Path, peers: Peers | None
) -> str | None:
    """Returns what is damaged of a checkpoint, for any process, or `None`.

    Each process reads all of its files, as it is going to when it restores it. Raises,
    in all processes, if they do not see the same one.
    """
    if peers is None:
        return None if chosen is None else find_damage(chosen)
    with peers.announcing_errors():
        own = _look(chosen, directory)
    said = peers.gather("the checkpoint to restore", json.dumps([*own, str(directory)]))
    found = [json.loads(text) for text in said]
    if len({text for text, is_damaged, _ in found if not is_damaged}) > 1:
        shown = "\n".join(
            f"  process {index} of {peers.count}: {text}, in {place}"
            for index, (text, _, place) in enumerate(found)
        )
        raise CheckpointError(
            "The processes do not see the same checkpoint to restore:\n"
            f"{shown}\n"
            "Give `CheckpointManager` a directory that all of them see, such as one of "
            "a shared file system. Nothing was restored."
        )
    damages = {i: text for i, (text, is_damaged, _) in enumerate(found) if is_damaged}
    if len(damages) == peers.count and len(set(damages.values())) == 1:
        return damages[0]
    return (
        "; ".join(
            f"in process {index} of {peers.count}, {damage}"
            for index, damage in damages.items()
        )
        or None
    )


def _look(chosen: epath.Path | None, directory: epath.Path) -> tuple[str, bool]:
    """Returns what this process sees of a checkpoint, and whether that is damage."""
    if chosen is None:
        saved = find_checkpoints(directory)
        newest = saved[-1] if saved else None
        return (_describe(newest.path, newest.header) if newest else "nothing"), False
    if not chosen.exists():
        return "nothing", False
    damage = find_damage(chosen)
    if damage is not None:
        return damage, True
    header = read_header(chosen)
    if header is None:
        return "nothing", False
    # All files are as they are listed there: the same list means the same content.
    sums = hashlib.sha256((chosen / CHECKSUM_FILE).read_bytes()).hexdigest()[:12]
    return f"{_describe(chosen, header)} (`{CHECKSUM_FILE}` #{sums})", False


def _describe(path: epath.Path, header: Header) -> str:
    time = datetime.fromtimestamp(header.saved_at, UTC)
    return f"{path.name} of {time:%Y-%m-%d %H:%M:%S.%f}"


def make_writer(directory: epath.Path, **options: Any) -> "Writer | JointWriter":
    """Returns what writes the checkpoints of a directory, alone or with others."""
    writer, peers = Writer(directory, **options), get_peers()
    return writer if peers is None else JointWriter(writer, peers)


class JointWriter:
    """Lets process 0 write, and all know of it. All call the same methods."""

    has_failed = False
    """Nobody knows of a failure before `sync`, in which all learn of it together."""

    def __init__(self, writer: Writer, peers: Peers) -> None:
        self._writer = writer
        self._peers = peers
        self._is_saving = False
        self.last_error: CheckpointError | None = None
        """The error of the last save, or `None`; the same in all processes."""

    def start(self, number: int, content: Content) -> str | None:
        """Starts a save and returns the path it is going to have, as `Writer` does."""
        is_writer = self._peers.index == 0
        # On all processes: computations on shared arrays must be made by all.
        stored = {
            name: as_stored_by_one(leaf, is_writer=is_writer)
            for name, leaf in content.leaves.items()
        }
        content = dataclasses.replace(content, stored=stored)
        path = self._share("a save", lambda: self._writer.start(number, content))
        self._is_saving = True
        return path

    def sync(self) -> None:
        """Waits until the last save is complete and old checkpoints are removed."""
        if not self._is_saving:
            return
        self._is_saving = False
        if not self._peers.has_failed:
            self._share("the end of a save", self._writer.sync)
        elif self._peers.index == 0:
            # Nobody answers any more, but what was started can still be completed.
            self._writer.sync()

    def close(self) -> None:
        """Waits like `sync`, and ends the threads that write."""
        try:
            self.sync()
        finally:
            self._writer.close()

    def _share(self, topic: str, function: Callable[[], T]) -> T:
        """Calls `function` in process 0 and returns what it did there."""

        def call() -> tuple[T, str | None]:
            value, noted = function(), self._writer.last_error
            return value, None if noted is None else str(noted)

        try:
            value, logged = decide(topic, call, self._peers)
        except CheckpointError as error:
            self.last_error = error
            raise
        self.last_error = None if logged is None else CheckpointError(logged)
        return value
