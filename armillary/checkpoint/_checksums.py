"""Sizes and checksums of the files of a checkpoint.

TensorStore's arrays have no checksums, so a flipped bit would change a weight
unnoticed. The last file of a checkpoint lists the sizes and CRC-32 sums of all other
files, and has a checksum itself. It detects errors of disks and copies, but not
manipulation.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

from etils import epath

from armillary.checkpoint._storage import NUM_THREADS, find_files, list_entries
from armillary.cluster._peers import ALONE, Peers
from armillary.goodput._stopwatch import Category
from armillary.lifeline._transfer import Transfer

CHECKSUM_FILE = "checksums.json"
# Errors from JSON that Armillary did not write.
BAD_JSON = (
    ArithmeticError,
    AttributeError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
# Each process of a job verifies smaller files, because it reads most of them. The
# larger ones are shared out, so that each of them is read once.
_LARGE_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20

# The size and the CRC-32 of a file.
Sum = tuple[int, int]


def measure_all(folder: epath.Path, files: Iterable[epath.Path]) -> dict[str, Sum]:
    """Returns the sums of some files, by their names in the folder."""
    return {file.relative_to(folder).as_posix(): measure(file) for file in files}


def write_checksums(
    folder: epath.Path, known: Mapping[str, Sum] = MappingProxyType({})
) -> None:
    """Writes the sums of every file of the items into one more file.

    Args:
        folder: The folder of the checkpoint.
        known: Sums of files that other processes have measured.
    """
    # Files next to the items are left out, because nobody reads them.
    sums = dict(known)
    for item in list_entries(folder):
        if item.is_dir():
            files = find_files(item)
            names = {file.relative_to(folder).as_posix(): file for file in files}
            new = [file for name, file in names.items() if name not in known]
            sums |= measure_all(folder, new)

    content = {"crc": _sum_up(sums), "files": sums}
    (folder / CHECKSUM_FILE).write_text(json.dumps(content))


def read_checksums(folder: epath.Path) -> dict[str, Sum]:
    """Returns the size and CRC-32 of each file.

    Raises:
        ValueError: If the list of checksums is missing or damaged.
    """
    try:
        sums = json.loads((folder / CHECKSUM_FILE).read_bytes())
        if sums.keys() == {"crc", "files"}:
            crc = sums["crc"]
            sums = sums["files"]
            if crc != _sum_up(sums):
                raise ValueError("its own checksum differs")
        # Version 2 of the format had only the sums of the files.
        return {name: (int(size), int(crc)) for name, (size, crc) in sums.items()}
    except (OSError, *BAD_JSON) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"`{CHECKSUM_FILE}` cannot be used ({reason})") from error


def _sum_up(sums: object) -> int:
    return zlib.crc32(json.dumps(sums).encode())


def find_damage(folder: epath.Path, peers: Peers = ALONE) -> str | None:
    """Returns a sentence on a file that has changed since the save, or `None`.

    In a job of several processes, each process verifies a share of the large files. All
    of them verify the names and sizes of all files, and the content of small files.
    """
    try:
        expected = read_checksums(folder)
        # An additional file could have a name of Orbax's older formats, and would then
        # be read. Hidden files are made by file systems.
        for file in find_files(folder / "arrays"):
            name = file.relative_to(folder).as_posix()
            if name not in expected and not file.name.startswith("."):
                return f"`{name}` was added after it was saved"
    except (ValueError, OSError) as error:
        return str(error)

    left_to_others = _share_out(expected, peers)
    num_bytes = 0
    for name, (size, _) in expected.items():
        if name not in left_to_others:
            num_bytes += size
    transfer = Transfer(Category.RESTORING, "verified", num_bytes)

    def verify(name: str) -> str | None:
        if name in left_to_others:
            return compare_size(folder, name, expected[name])
        return compare(folder, name, expected[name], transfer.add)

    with transfer.reported(), ThreadPoolExecutor(NUM_THREADS) as pool:
        problems = pool.map(verify, expected)
        return next((problem for problem in problems if problem is not None), None)


def _share_out(expected: Mapping[str, Sum], peers: Peers) -> set[str]:
    """Returns the large files that other processes verify."""
    large = [name for name, (size, _) in expected.items() if size > _LARGE_BYTES]
    # ORDER: all processes must share them out alike. The largest ones come first, so
    # that the shares become equal.
    large.sort(key=lambda name: (-expected[name][0], name))
    num_bytes = [0] * peers.count
    others: set[str] = set()
    for name in large:
        index = num_bytes.index(min(num_bytes))
        num_bytes[index] += expected[name][0]
        if index != peers.index:
            others.add(name)
    return others


def compare(
    folder: epath.Path,
    name: str,
    saved: Sum,
    note: Callable[[int], None] | None = None,
) -> str | None:
    """Returns a sentence on a file that does not match its size and checksum.

    It calls `note` with the number of bytes whenever it has read some.
    """
    return _compare(folder, name, saved, lambda file: measure(file, note))


def compare_size(folder: epath.Path, name: str, saved: Sum) -> str | None:
    """Returns a sentence on a file that does not match its size."""
    _, crc = saved

    def look(file: epath.Path) -> Sum:
        return file.stat().length, crc

    return _compare(folder, name, saved, look)


def _compare(
    folder: epath.Path, name: str, saved: Sum, look: Callable[[epath.Path], Sum]
) -> str | None:
    saved_size, saved_crc = saved
    try:
        size, crc = look(folder / name)
    except FileNotFoundError:
        return f"`{name}` is missing"
    except OSError as error:
        return f"`{name}` cannot be read ({type(error).__name__}: {error})"
    if size != saved_size:
        return f"`{name}` has {size} bytes instead of {saved_size}"
    if crc != saved_crc:
        return f"the content of `{name}` has changed (its checksum differs)"
    return None


def measure(file: epath.Path, note: Callable[[int], None] | None = None) -> Sum:
    """Returns the size and the CRC-32 of a file."""
    size = 0
    crc = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            size += len(block)
            crc = zlib.crc32(block, crc)
            if note is not None:
                note(len(block))
    return size, crc
