"""Waits until files are on the disk, so that they survive a power cut.

A file survives once `fsync` has been called for it, and for each folder up to the root.
In an object store, a file is on disk once the write has returned.
"""

import contextlib
import errno
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from etils import epath

# Several files at a time, because disks and network file systems answer slowly.
NUM_THREADS = 8


def is_remote(path: epath.Path) -> bool:
    """Returns whether a path is in an object store, such as `gs://bucket/run`."""
    return "://" in str(path)


def sync_files(files: Iterable[epath.Path]) -> None:
    """Waits until some files are on the disk, and the folders that hold them."""
    paths = [Path(file) for file in files if not is_remote(file)]
    _sync_all([*paths, *{path.parent for path in paths}])


def sync_tree(folder: epath.Path) -> None:
    """Waits until a folder and everything in it are on the disk."""
    if is_remote(folder):
        return
    paths: list[Path] = []
    for top, _, names in os.walk(folder):
        paths.append(Path(top))
        paths += [Path(top, name) for name in names]
    _sync_all(paths)


def sync_name(folder: epath.Path) -> None:
    """Waits until a folder's name, and the files directly in it, are on the disk."""
    if is_remote(folder):
        return
    path = Path(folder)
    files = [file for file in path.iterdir() if file.is_file()]
    _sync_all([*files, path, path.parent])
    for above in path.parent.parents:
        # They may be new as well. Folders of other users may not be readable.
        with contextlib.suppress(OSError):
            _sync(above)


def _sync_all(paths: Iterable[Path]) -> None:
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(_sync, paths))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems have no `fsync` for folders, and return this error.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
