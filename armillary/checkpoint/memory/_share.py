"""The files of one share of a snapshot: parts of arrays, and their description.

`share_<k>.bin` has the parts one after the other. `share_<k>.json` is written last, so
a share is complete once this file exists. It has the place and the checksum of each
part, and a checksum of its own.
"""

import contextlib
import dataclasses
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

_BLOCK_BYTES = 8 << 20
_SNAPSHOT = re.compile(r"snapshot_(\d+)")
_SHARE = re.compile(r"share_(\d+)\.json")


class Box(NamedTuple):
    """A part of an array: the rows of each axis, from `start` up to `stop`."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    def overlap(self, other: "Box") -> "Box | None":
        """Returns the elements that two parts of an array share, if any."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        is_empty = any(a >= b for a, b in zip(start, stop, strict=True))
        return None if is_empty else Box(start, stop)

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Returns the place of this part in an array that holds `outer` alone."""
        place: list[slice] = []
        for start, stop, first in zip(self.start, self.stop, outer.start, strict=True):
            place.append(slice(start - first, stop - first))
        return tuple(place)


def as_box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the part of an array of this shape that slices select."""
    starts: list[int] = []
    stops: list[int] = []
    for each, size in zip(index, shape, strict=True):
        start, stop, _ = each.indices(size)
        starts.append(start)
        stops.append(stop)
    return Box(tuple(starts), tuple(stops))


class Part(NamedTuple):
    """A part of the array `name`, as it lies in the file of a share."""

    name: str
    box: Box
    dtype: str
    offset: int
    size: int  # Bytes.
    crc: int


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The facts about a snapshot that are the same in all of its shares."""

    run: str  # Identifies the directory of checkpoints, as long as it exists.
    token: str  # Is different for each snapshot, also if a number is used again.
    number: int  # Counts the snapshots of a run.
    count: int  # The number of shares.
    step: int | None
    # The times (`saved_at`) of the newest complete checkpoint on the disk when the
    # snapshot was taken, and of the newest save that had begun.
    complete: float
    begun: float
    # The step of the last save on the disk.
    saved_step: int | None


@dataclasses.dataclass(frozen=True)
class Share:
    """The description of one share."""

    snapshot: Snapshot
    index: int
    parts: tuple[Part, ...]
    # The description of all leaves and the states of Python objects, in share 0.
    manifest: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(part.size for part in self.parts)

    def as_text(self) -> str:
        """Returns the content of the description's file."""
        text = json.dumps(dataclasses.asdict(self))
        return f"{zlib.crc32(text.encode())}\n{text}"


def parse_share(content: str) -> Share:
    """Returns a share from the content of its file.

    Raises:
        ValueError: If the content has changed.
    """
    crc, _, text = content.partition("\n")
    if crc != str(zlib.crc32(text.encode())):
        raise ValueError("its checksum differs")

    fields = json.loads(text)
    parts: list[Part] = []
    for name, (start, stop), *others in fields.pop("parts"):
        box = Box(tuple(start), tuple(stop))
        parts.append(Part(name, box, *others))
    snapshot = Snapshot(**fields.pop("snapshot"))
    return Share(snapshot=snapshot, parts=tuple(parts), **fields)


class Place(NamedTuple):
    """The place of a share below the folder of a run: it names the files."""

    holder: int  # The process that wrote the files.
    number: int
    share: int

    @property
    def folder(self) -> str:
        return f"process_{self.holder}/snapshot_{self.number}"

    @property
    def data(self) -> str:
        return f"{self.folder}/share_{self.share}.bin"

    @property
    def description(self) -> str:
        return f"{self.folder}/share_{self.share}.json"


def write_parts(
    file: Path,
    parts: Mapping[tuple[str, Box], np.ndarray],
    note: Callable[[int], None],
) -> tuple[Part, ...]:
    """Writes parts of arrays into a new file, still without checksums.

    It calls `note` with the bytes of each part.
    """
    size = sum(array.nbytes for array in parts.values())
    placed: list[Part] = []
    with reserved(file, size) as stream:
        for (name, box), array in parts.items():
            # The name of a dtype has no byte order.
            array = array.astype(array.dtype.newbyteorder("="), copy=False)
            part = Part(
                name,
                box,
                dtype=array.dtype.name,
                offset=stream.tell(),
                size=array.nbytes,
                crc=0,
            )
            placed.append(part)
            stream.write(_as_bytes(array))
            note(array.nbytes)
    return tuple(placed)


@contextlib.contextmanager
def reserved(file: Path, size: int) -> Iterator[Any]:
    """Opens a new file whose memory is reserved, so that no write fails halfway."""
    with naming(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as stream:
            if size and hasattr(os, "posix_fallocate"):  # macOS has none.
                os.posix_fallocate(stream.fileno(), 0, size)
            yield stream


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Adds a file to the error of a write. The error of a full disk has no name."""
    try:
        yield
    except OSError as error:
        raise OSError(f"`{file}` cannot be written ({error})") from error


def explain(error: Exception) -> str:
    """Returns the reason of a failure, which an `OSError` has in its text."""
    if isinstance(error, OSError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def with_checksums(file: Path, parts: Sequence[Part]) -> tuple[Part, ...]:
    """Returns the parts with the checksums of their bytes in a file."""
    summed: list[Part] = []
    with file.open("rb") as stream:
        for part in parts:
            stream.seek(part.offset)
            summed.append(part._replace(crc=_sum_up(stream, part.size)))
    return tuple(summed)


def describe_share(folder: Path, share: Share) -> None:
    """Completes a share whose parts are written."""
    file = folder / f"share_{share.index}.json"
    unfinished = file.with_suffix(".tmp")
    with naming(file):
        unfinished.write_text(share.as_text())
        # ORDER: a share is complete with this name.
        unfinished.rename(file)


def find_damage(file: Path, parts: Sequence[Part]) -> str | None:
    """Returns a sentence about a part that has changed since it was written."""
    try:
        found = with_checksums(file, parts)
    except OSError as error:
        return f"`{file}` cannot be read ({type(error).__name__}: {error})"
    for part, now in zip(parts, found, strict=True):
        if part.crc != now.crc:
            return f"the content of `{file}` has changed (`{part.name}`)"
    return None


def find_shares(base: Path) -> dict[Place, Share]:
    """Returns the complete shares below the folder of a run."""
    found: dict[Place, Share] = {}
    for folder in base.glob("process_*/snapshot_*"):
        number = _SNAPSHOT.fullmatch(folder.name)
        holder = folder.parent.name.removeprefix("process_")
        if number is None or not holder.isdecimal():
            continue
        for file in folder.glob("share_*.json"):
            index = _SHARE.fullmatch(file.name)
            # Another process may remove old snapshots meanwhile.
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                share = parse_share(file.read_text())
                assert index is not None
                found[Place(int(holder), int(number[1]), int(index[1]))] = share
    return found


def read_array(buffer: Any, part: Part) -> np.ndarray:
    """Returns a part whose bytes are in a buffer."""
    array = np.frombuffer(buffer, dtype=jnp.dtype(part.dtype))
    return array.reshape(part.box.shape)


def _as_bytes(array: np.ndarray) -> memoryview:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data


def _sum_up(stream: Any, size: int) -> int:
    crc = 0
    while size:
        block = stream.read(min(size, _BLOCK_BYTES))
        if not block:
            return -1  # The file is too short.
        crc = zlib.crc32(block, crc)
        size -= len(block)
    return crc
