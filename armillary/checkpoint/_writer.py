"""Saves in the background, and removes old checkpoints afterwards.

`start` blocks until the arrays may change again. A thread then waits until the
checkpoint is on the disk. Only after that, it removes checkpoints that are expired, or
that were saved again.

In a job of several processes, each process writes its part, and process 0 chooses the
path and completes the folder. If a part is not written, all processes raise the same
`CheckpointError`. So no process waits forever, and a program that handles the error can
continue.
"""

import contextlib
import dataclasses
import functools
import json
import math
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from time import monotonic
from typing import TypeVar

import jax
from etils import epath

from armillary._launcher import notify_launcher
from armillary._logging import logger
from armillary._process import is_first
from armillary._rising_clock import RisingClock
from armillary.checkpoint import _folder
from armillary.checkpoint._best import Mark, read_best, write_best
from armillary.checkpoint._commit import PartError, write_folder
from armillary.checkpoint._content import Content
from armillary.checkpoint._folder import Saved
from armillary.checkpoint._storage import sync_name
from armillary.cluster._join import get_peers
from armillary.cluster._peers import Peers
from armillary.errors import CheckpointError
from armillary.lifeline._ending import finish_first

T = TypeVar("T")
# With `checkpoint_interval="auto"`, saves begin at least this many seconds apart.
_MIN_SECONDS = 10.0
# They are also this many seconds apart for each second that training waited for a save
# (so waiting takes 1 % of the time), and for each second of writing.
_PER_WAITED = 100.0
_PER_WRITTEN = 10.0
_writers: "weakref.WeakSet[Writer]" = weakref.WeakSet()


def announcing_errors() -> contextlib.AbstractContextManager[None]:
    """Returns a context that sends its errors to the other processes, if any."""
    return get_peers().announcing_errors()


def agree_on(topic: str, function: Callable[[], T], peers: Peers) -> T:
    """Returns the result of `function` in the first process to all processes.

    All processes must call it. The result travels as JSON.
    """
    if peers.is_alone:
        return function()
    value = problem = None
    if peers.index == 0:
        with peers.announcing_errors():
            try:
                value = function()
            except CheckpointError as error:
                problem = error
    own = json.dumps([value, None if problem is None else str(problem)])
    # The answers of the other processes are empty, and only the first one counts.
    first, *_ = peers.gather(topic, own)
    value, text = json.loads(first)
    if text is not None:
        raise problem or CheckpointError(text)
    return value


class Writer:
    """Writes the checkpoints of one directory, one at a time. All processes call it."""

    def __init__(
        self,
        directory: epath.Path,
        max_to_keep: int | None,
        keep_every_hours: float | None,
    ) -> None:
        self._directory = directory
        self._max_to_keep = max_to_keep
        self._keep_every_hours = keep_every_hours
        self._peers = get_peers()
        self._clock = RisingClock()
        self._preserved_at = self._clock.now()
        # In process 0, the checkpoints to remove when the one being saved is complete.
        self._expired: list[Saved] = []
        self._has_cleaned = False
        self._is_saving = False
        # In process 0, the time of the last save in its header.
        self.last_saved_at = 0.0
        # The thread that completes the current save, and its error.
        self.thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        # The time at which the last save began.
        self._began = 0.0
        # The step and the time of the last call of `find_interval`.
        self._paced = (-1, 0.0)
        self._write_seconds = 0.0

    def start(self, number: int, content: Content, mark: Mark | None = None) -> str:
        """Starts a save, and marks it as the best if `mark` is given.

        Call `sync` before.
        """
        self._began = monotonic()
        check_has_joined(self._peers)
        chosen: list[Saved] = []

        def choose() -> list[str]:
            path = self._directory / f"checkpoint_{number}"
            try:
                chosen[:] = self._choose(number, content.has_arrays, mark)
                path = chosen[-1].path
                return _name_save(path)
            except Exception as error:
                raise self._make_failure(path, error) from error

        path, unfinished, key = agree_on("a save", choose, self._peers)
        self._write(epath.Path(path), epath.Path(unfinished), key, content, chosen)
        self._is_saving = True
        return str(path)

    def find_interval(self, step: int) -> int | None:
        """Returns the number of steps to the next save, so that saves cost little time.

        It returns `None` while the duration of a step is unknown.
        """
        last, at = self._paced
        self._paced = (step, self._began)
        if not 0 <= last < step:
            return None
        seconds = max(
            _MIN_SECONDS,
            _PER_WAITED * (monotonic() - self._began),
            _PER_WRITTEN * self._write_seconds,
        )
        steps = math.ceil(seconds * (step - last) / (self._began - at))
        return agree_on("how often to save", lambda: steps, self._peers)

    def sync(self) -> None:
        """Waits until the last save is on the disk and old checkpoints are removed."""
        if not self._is_saving:
            return
        self._is_saving = False
        if self._peers.index:
            self._wait()  # for the part of this process
        if not self._peers.has_failed:
            agree_on("the end of a save", self._wait, self._peers)
        elif self._peers.index == 0:
            # The other processes no longer answer, but their parts may be complete.
            self._wait()

    def _choose(self, number: int, has_arrays: bool, mark: Mark | None) -> list[Saved]:
        """Returns the complete checkpoints, and the header of the new one at last."""
        self._directory.mkdir(parents=True, exist_ok=True)
        # Not in the constructor: a manager that only reads must not remove the folder
        # that another process is writing.
        if not self._has_cleaned and is_first():
            for thread in find_running():
                thread.join()  # Another manager of this program may write here.
            _folder.remove_leftovers(self._directory)
        self._has_cleaned = True

        saved, _ = _folder.list_directory(self._directory)
        path = _folder.choose_path(self._directory, number, saved)
        new = self._make_header(path, number, saved, has_arrays)
        self._expired, preserved_at = self._find_expired([*saved, new])
        # Its own header says so, because later runs may have other options.
        new = dataclasses.replace(new, preserved_at=preserved_at)
        self.last_saved_at = new.saved_at
        if mark is not None:
            write_best(self._directory, new, mark)
        return [*saved, new]

    def _write(
        self,
        path: epath.Path,
        unfinished: epath.Path,
        key: str,
        content: Content,
        saved: list[Saved],
    ) -> None:
        """Copies the arrays, and starts the thread that writes them.

        In the first process, `saved` are the complete checkpoints and the new one.
        """
        try:
            wait = write_folder(
                unfinished,
                content,
                self._peers,
                key,
                header=saved[-1] if saved else None,
                # Its header counts these saves, so they must get their names first.
                earlier=find_running(),
            )
        except Exception as error:
            raise self._make_failure(path, error) from error

        _finish_before_exit()
        _writers.add(self)
        self.thread = threading.Thread(
            target=self._finish, args=(path, saved, wait), name="armillary-checkpoint"
        )
        self.thread.start()

    def _make_header(
        self, path: epath.Path, number: int, earlier: list[Saved], has_arrays: bool
    ) -> Saved:
        """Returns the header of the next checkpoint, after `earlier` ones."""
        last = earlier[-1] if earlier else None
        if last is not None:
            # A restarted run continues from the last checkpoint that was kept for good.
            self._preserved_at = last.preserved_at
            self._clock.start_after(max(last.saved_at, last.preserved_at))
        serial = last.serial + 1 if last else 1
        saved_at = self._clock.now()
        return Saved(path, number, serial, saved_at, self._preserved_at, has_arrays)

    def _finish(
        self, path: epath.Path, saved: list[Saved], wait: Callable[[], None]
    ) -> None:
        try:
            wait()
            self._write_seconds = monotonic() - self._began
            if not saved:
                return  # The first process completes the checkpoint.
            # ORDER: before an older checkpoint is removed.
            sync_name(path)
            if is_first():
                notify_launcher("saved", saved[-1].number, str(path))
        except Exception as error:
            self._failure = self._make_failure(path, error)
        else:
            self._remove(self._expired, saved)

    def mark(self, path: str, mark: Mark, *, removes: bool) -> None:
        """Marks a complete checkpoint as the best one, in the first process."""
        saved = _folder.read_header(epath.Path(path))
        if isinstance(saved, Saved):
            write_best(self._directory, saved, mark)
        else:
            logger.warning(
                f"`{path}` is the best, but another program removed it while it was "
                "evaluated. Set a larger `max_to_keep` in the other program."
            )
        if removes:
            complete, _ = _folder.list_directory(self._directory)
            expired, _ = self._find_expired(complete)
            self._remove(expired, complete)

    def _find_expired(self, saved: list[Saved]) -> tuple[list[Saved], float]:
        """Returns the checkpoints to remove, and `saved_at` of the last one to keep."""
        preserved_at = self._preserved_at
        newest = {entry.number: entry for entry in saved}
        # Checkpoints whose number was saved again.
        expired = [entry for entry in saved if newest[entry.number] is not entry]
        active = [entry for entry in saved if entry not in expired]
        # Older checkpoints are kept for good.
        active = [entry for entry in active if entry.saved_at > preserved_at]
        most = len(active) if self._max_to_keep is None else self._max_to_keep
        num_surplus = max(0, len(active) - most)

        hours = self._keep_every_hours
        for entry in active[:num_surplus]:
            age = entry.saved_at - preserved_at
            if hours is not None and age >= 3600 * hours:
                preserved_at = entry.saved_at
            else:
                expired.append(entry)
        return expired, preserved_at

    def _remove(self, expired: list[Saved], complete: list[Saved]) -> None:
        """Removes some of the `complete` checkpoints, in the first process."""
        if not is_first():
            return
        for entry in expired:
            try:
                # Read each time, because another job may evaluate.
                best = read_best(self._directory)
                if best is None or best.saved != entry:
                    _folder.remove(entry.path)
            except Exception as error:
                logger.warning(
                    f"`{complete[-1].path}` is complete, but `{entry.path}` cannot be "
                    f"removed: {error}. Check its permissions, or keep all checkpoints "
                    "(`max_to_keep=None`)."
                )

    def _wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure

    def _make_failure(self, path: epath.Path, error: Exception) -> CheckpointError:
        """Frees the space of a failed save, and returns its error."""
        # Files that threads of Orbax still write are removed before the next save.
        self._has_cleaned = False
        with contextlib.suppress(OSError):
            if is_first():
                _folder.remove_unfinished(path)
        failure = CheckpointError(
            f"Saving `{path}` failed: {_explain(error)}. It is not complete, and "
            "earlier checkpoints are unchanged. Make room, and start again. A program "
            "of one process can also catch this error and continue."
        )
        failure.__cause__ = error
        return failure


def write_once(choose: Callable[[], Saved], content: Content) -> str:
    """Writes one checkpoint without a manager, and waits until it is complete.

    `choose` returns its path and header in the first process. All processes call this.
    """
    peers = get_peers()
    check_has_joined(peers)
    chosen: list[Saved] = []

    def begin() -> list[str]:
        for thread in find_running():
            thread.join()  # Its header must come after theirs.
        saved = choose()
        chosen.append(saved)
        with _failing_once(saved.path):
            return _name_save(saved.path)

    name, unfinished, key = agree_on("a save", begin, peers)
    path = epath.Path(name)
    header = chosen[0] if chosen else None
    with _failing_once(path):
        finish = write_folder(
            epath.Path(unfinished), content, peers, key, header=header
        )

    def complete() -> None:
        with _failing_once(path):
            finish()
            sync_name(path)

    if peers.index:
        finish()
    agree_on("the end of a save", complete, peers)
    return str(path)


def _name_save(path: epath.Path) -> list[str]:
    """Returns the path of a checkpoint, its unfinished folder, and a unique text."""
    unfinished = _folder.make_unfinished(path)
    return [str(path), str(unfinished), secrets.token_hex(8)]


def check_has_joined(peers: Peers) -> None:
    """Raises if the program has joined processes that this library does not know."""
    if peers.is_alone and jax.distributed.is_initialized() and jax.process_count() > 1:
        raise CheckpointError(
            f"This program has joined {jax.process_count()} processes itself, so each "
            "of them would write a checkpoint without the parts of the others. Make a "
            "strategy of several processes first, for example "
            "`armillary.MultiWorkerMirroredStrategy()`: it finds the processes."
        )


@contextlib.contextmanager
def _failing_once(path: epath.Path) -> Iterator[None]:
    """Removes the files of a save that fails, and raises its error."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):
            _folder.remove_unfinished(path)
        raise CheckpointError(
            f"Saving `{path}` failed: {_explain(error)}. It is not complete. Make "
            "room, or use another path, and save again."
        ) from error


def _explain(error: Exception) -> str:
    if isinstance(error, PartError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def find_running() -> list[threading.Thread]:
    """Returns the threads of all saves that are not complete yet, in any directory."""
    threads = [writer.thread for writer in list(_writers)]
    return [thread for thread in threads if thread is not None and thread.is_alive()]


@functools.cache
def _finish_before_exit() -> None:
    """Completes running saves when the program ends, even after an error.

    `atexit` runs too late, because executors no longer take work then
    (python/cpython#148280). Hooks of `threading._register_atexit` run in reverse order,
    so this hook runs before the hooks of executors. In Python 3.12.0 to 3.12.2, no hook
    can wait for a save (python/cpython#113964), so `pyproject.toml` excludes them.
    """

    def finish() -> None:
        for writer in list(_writers):
            try:
                writer._wait()
            except CheckpointError as error:
                logger.error("%s", error)

    threading._register_atexit(finish)  # pyright: ignore[reportAttributeAccessIssue]
    # A save also completes if this process exits because another process is lost.
    finish_first(lambda: bool(find_running()))
