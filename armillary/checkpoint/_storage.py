"""The differences between a file system and an object store, such as `gs://bucket/run`.

In a file system, a file survives a power cut once `fsync` has been called for it, and
for each folder up to the root. In an object store, a file is on disk once the write has
returned. An object store has no folders: a folder exists as long as files are in it,
and it cannot be renamed.
"""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from etils import epath

# Several files at a time, because disks and network file systems answer slowly.
NUM_THREADS = 8


def is_remote(path: epath.Path) -> bool:
    """Returns whether a path is in an object store, such as `gs://bucket/run`."""
    return "://" in str(path)


def keep_no_listings() -> None:
    """Makes `gcsfs` look into a folder each time, because other jobs write there."""
    from fsspec.config import conf

    conf.setdefault("gcs", {})["use_listings_cache"] = False


def list_entries(folder: epath.Path) -> list[epath.Path]:
    """Returns the entries of a folder; none if it does not exist."""
    try:
        entries = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    # Some object stores also list the folder itself.
    return [entry for entry in entries if entry != folder]


def find_files(folder: epath.Path) -> Iterator[epath.Path]:
    """Yields all files below a folder."""
    for path in list_entries(folder):
        # Armillary makes no links to folders, and they might lead in a circle.
        if path.is_dir() and not os.path.islink(path):
            yield from find_files(path)
        else:
            yield path


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
    """Waits until a folder's name, and the files directly in it, are on the disk.

    Only for a folder that nothing else uses: see `sync_folder`.
    """
    if is_remote(folder):
        return
    _sync_all([file for file in Path(folder).iterdir() if file.is_file()])
    sync_folder(folder)


def sync_folder(folder: epath.Path) -> None:
    """Waits until a folder, its name, and the names in it are on the disk.

    It opens no files in it. In the directory of a run, one of them is the lock of the
    training, and to close any descriptor of a file frees the locks of the process.
    """
    if is_remote(folder):
        return
    path = Path(folder)
    _sync_all([path, path.parent])
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
