"""What the disk must do for a checkpoint: keep it through a power cut, and never block.

A file outlasts a power cut once its content is on the disk, its name in the folder
above is, and so on up to the root. Writing, closing and renaming promise none of that,
only `fsync` does. An object store has on its disks what it has taken.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etils import epath

NUM_THREADS = 8
"""Several files at a time, because disks and network file systems answer slowly."""


def sync_tree(folder: epath.Path) -> None:
    """Waits until a folder and everything in it are on the disk."""
    if "://" not in str(folder):
        walk = os.walk(folder)
        _sync_all(Path(top, name) for top, _, names in walk for name in ("", *names))


def sync_name(folder: epath.Path) -> None:
    """Waits until a new name is on the disk, and the files directly in the folder."""
    if "://" in str(folder):
        return
    path = Path(folder)
    _sync_all([*(file for file in path.iterdir() if file.is_file()), path, path.parent])
    for above in path.parent.parents:
        # They may be new as well, or be others', who let nobody read them.
        with contextlib.suppress(OSError):
            _sync(above)


def _sync_all(paths: Iterable[Path]) -> None:
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for _ in pool.map(_sync, paths):
            pass


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # So says a file system that has no such thing for folders.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def check_is_regular(file: epath.Path) -> None:
    """Raises an `OSError` for what may never end: a pipe, a socket or a device."""
    if "://" not in str(file) and not stat.S_ISREG(os.stat(file).st_mode):
        raise OSError("not a regular file")


def read_json(file: epath.Path) -> Any:
    """Returns what a JSON file holds, or raises an `OSError` or a `ValueError`."""
    check_is_regular(file)
    try:
        return json.loads(file.read_bytes())
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
