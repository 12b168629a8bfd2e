"""Writes files that a reader finds whole, or not at all."""

import os

from etils import epath


def write_whole(path: epath.Path, data: bytes | bytearray, temporary: str) -> None:
    """Writes a file that has its name only when all of it is on the disk.

    Until then it has a temporary name, in the same directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / temporary
    try:
        with unfinished.open("wb") as stream:
            stream.write(data)
            stream.flush()
            if "://" not in str(path):
                os.fsync(stream.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
