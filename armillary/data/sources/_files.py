"""Finds files by patterns, and reads their parts: local files and object stores."""

import contextlib
import glob
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

_COPY = "Or copy the files to this machine and pass their paths."


class OpenFile(NamedTuple):
    """A file that is open: its size in bytes, and a function that reads a part.

    `read` takes a number of bytes and an offset. It returns fewer bytes at the end of
    the file.
    """

    size: int
    read: Callable[[int, int], bytes]


def is_remote(path: str) -> bool:
    """Returns whether a path is an address, such as `gs://bucket/file`."""
    return "://" in path


def find_files(paths: Iterable[str]) -> list[str]:
    """Returns the files of paths and patterns, sorted within each pattern.

    Raises:
        FileNotFoundError: If there is no file of that name, and no file that fits.
        ImportError: If an address needs a package that is not installed.
    """
    files: list[str] = []
    for path in paths:
        files += _find(path)
    return files


def _find(path: str) -> Sequence[str]:
    if is_remote(path):
        system, name = _connect(path)
        if system.isfile(name):
            return [path]
        found = [system.unstrip_protocol(match) for match in sorted(system.glob(name))]
    elif os.path.isfile(path):
        return [path]
    else:
        found = [match for match in sorted(glob.glob(path)) if os.path.isfile(match)]

    if not found:
        raise FileNotFoundError(
            f"`paths` has `{path}`, which is not a file, and no file fits it as a "
            'pattern. Write, for example, `"data/train-*.tfrecord"`, with the folder '
            f"of the files. The working directory is `{os.getcwd()}`."
        )
    return found


def _connect(path: str) -> tuple[Any, str]:
    """Returns the file system of an address, and the name of the file there."""
    try:
        import fsspec

        return fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        # A ValueError is about an unknown kind of address.
        raise ImportError(
            f"`paths` has `{path}`, which `fsspec` cannot read here: {error}. Install "
            f"the package for it, such as `gcsfs` for `gs://`. {_COPY}"
        ) from error


@contextlib.contextmanager
def opened(path: str) -> Iterator[OpenFile]:
    """Opens a file to read its parts."""
    if is_remote(path):
        system, name = _connect(path)
        with system.open(name, "rb") as file:

            def read_remote(length: int, offset: int) -> bytes:
                file.seek(offset)
                return file.read(length)

            yield OpenFile(file.seek(0, os.SEEK_END), read_remote)
        return

    with open(path, "rb", buffering=0) as file:
        number = file.fileno()

        def read_local(length: int, offset: int) -> bytes:
            data = os.pread(number, length, offset)
            while len(data) < length:
                more = os.pread(number, length - len(data), offset + len(data))
                if not more:
                    break
                data += more
            return data

        yield OpenFile(os.fstat(number).st_size, read_local)
