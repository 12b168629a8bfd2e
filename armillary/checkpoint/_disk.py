"""What a disk must do for a checkpoint: keep it, and give back what was written.

A file outlasts a power cut once its content is on the disk, its name in the folder
above is, and so on up to the root. Writing, closing and renaming promise none of that,
only `fsync` does. An object store has on its disks what it has taken.

The arrays that TensorStore stores have no checksums, so that a flipped bit would be
loaded as another weight. So the last file of a checkpoint lists the sizes and CRC-32
sums of the others, has a sum of its own, and is compared before anything is decoded. It
finds what disks and copies do to a file, and is no protection from someone who means
it.
"""

import contextlib
import errno
import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etils import epath

CHECKSUM_FILE = "checksums.json"
_BLOCK_BYTES = 1 << 20
# Several files at a time, because disks and network file systems answer slowly.
_NUM_THREADS = 8


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
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        list(pool.map(_sync, paths))


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


def read_json(file: epath.Path) -> Any:
    """Returns what a JSON file holds, or raises an `OSError` or a `ValueError`."""
    _check_is_regular(file)
    try:
        return json.loads(file.read_bytes())
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def _check_is_regular(file: epath.Path) -> None:
    # A pipe, a socket or a device may never end.
    if "://" not in str(file) and not stat.S_ISREG(os.stat(file).st_mode):
        raise OSError("not a regular file")


def write_checksums(folder: epath.Path) -> None:
    """Writes the size and checksum of every file of the items into one more file.

    Files beside the items are left out: Orbax still changes them, and nobody reads
    them.
    """
    items = [path for path in folder.iterdir() if path.is_dir()]
    files = [file for item in items for file in _find_files(item)]
    sums = {file.relative_to(folder).as_posix(): _measure(file) for file in files}
    content = {"crc": _sum_up(sums), "files": sums}
    (folder / CHECKSUM_FILE).write_text(json.dumps(content))


def read_checksums(folder: epath.Path) -> dict[str, tuple[int, int]]:
    """Returns the size and CRC-32 of each file; a `ValueError` says what is wrong."""
    try:
        sums = read_json(folder / CHECKSUM_FILE)
        if sums.keys() == {"crc", "files"}:
            crc, sums = sums["crc"], sums["files"]
            if crc != _sum_up(sums):
                raise ValueError("its own checksum differs")
        # Version 2 of the format had the sums of the files alone.
        return {name: (int(size), int(crc)) for name, (size, crc) in sums.items()}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"`{CHECKSUM_FILE}` cannot be used ({reason})") from error


def _sum_up(sums: object) -> int:
    return zlib.crc32(json.dumps(sums).encode())


def find_damage(folder: epath.Path) -> str | None:
    """Returns which file of a checkpoint is not as it was saved, or `None` if all are.

    A file that was added among the arrays counts too: Orbax would read one of the name
    that an older format of its own had. Hidden ones do not: file systems make them.
    """
    try:
        expected = read_checksums(folder)
        arrays = folder / "arrays"
        for file in _find_files(arrays) if arrays.is_dir() else ():
            name = file.relative_to(folder).as_posix()
            if name not in expected and not file.name.startswith("."):
                return f"`{name}` was added after it was saved"
    except ValueError as error:
        return str(error)
    except (OSError, RecursionError) as error:
        return f"its folders cannot be read ({type(error).__name__}: {error})"
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        problems = pool.map(lambda item: compare(folder, *item), expected.items())
        return next((problem for problem in problems if problem is not None), None)


def compare(folder: epath.Path, name: str, saved: tuple[int, int]) -> str | None:
    """Returns what is wrong with a file of this size and CRC-32, or `None`."""
    try:
        _check_is_regular(folder / name)
        size, crc = _measure(folder / name)
    except FileNotFoundError:
        return f"`{name}` is missing"
    except (OSError, ValueError) as error:
        return f"`{name}` cannot be read ({type(error).__name__}: {error})"
    if size != saved[0]:
        return f"`{name}` has {size} bytes instead of {saved[0]}"
    if crc != saved[1]:
        return f"the content of `{name}` has changed (its checksum differs)"
    return None


def _measure(file: epath.Path) -> tuple[int, int]:
    """Returns the size of a file and its CRC-32."""
    size = crc = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return size, crc


def _find_files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in folder.iterdir():
        # A link to a folder is none of ours, and might lead in a circle.
        if path.is_dir() and not os.path.islink(path):
            yield from _find_files(path)
        else:
            yield path
