"""The folders of a directory: which are checkpoints, in which order, and which go.

A checkpoint is a folder `checkpoint_<number>` with a header. Numbers need not rise (a
run may go back to an older checkpoint), so the order is that of saving, by the serial
number in the header. Saving a number again makes `checkpoint_<number>.<revision>`, and
the older one goes only then: there is a complete one at every moment, no folder is ever
overwritten, and a path never gets another content while it exists. Everything else in
the directory belongs to others and is not touched.
"""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from etils import epath

from armillary._checks import check_path
from armillary.checkpoint._checksums import (
    CHECKSUM_FILE,
    compare,
    read_checksums,
    read_json,
)
from armillary.errors import CheckpointError

FORMAT = "armillary-checkpoint"
VERSION = 3
_READABLE = (2, VERSION)
HEADER_FILE = "header.json"
_NAME = re.compile(r"checkpoint_(\d+)(?:\.(\d+))?")
_NUMBERS = ("number", "serial", "saved_at", "preserved_at")
_REMOVED_SUFFIX = ".armillary-removed"
_UNFINISHED = re.compile(rf"{_NAME.pattern}\.orbax-checkpoint-tmp.*")
_LEFTOVER = re.compile(
    rf"{_UNFINISHED.pattern}|{_NAME.pattern}{re.escape(_REMOVED_SUFFIX)}"
)


@dataclasses.dataclass(frozen=True)
class Header:
    """The short description of a checkpoint, read whenever folders are listed.

    Attributes:
        number: The number in the name of the folder.
        serial: Counts the saves of a directory, so a larger one is newer.
        saved_at: Seconds since the epoch, never falling from one save to the next.
        preserved_at: `saved_at` of the newest checkpoint that is kept for good, or when
            the directory was first used.
        has_arrays: Whether arrays belong to it.
    """

    number: int
    serial: int
    saved_at: float
    preserved_at: float
    has_arrays: bool

    def as_json(self) -> dict[str, Any]:
        """Returns what `read_header` reads."""
        return {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class Saved:
    """A complete checkpoint and its header."""

    path: epath.Path
    header: Header


class Listing(NamedTuple):
    """The entries of a directory that belong to checkpoints.

    Attributes:
        saved: The complete checkpoints, in the order of saving.
        broken: What looks like a checkpoint of ours and is not complete, with reasons.
            A folder of this name that holds none of our items belongs to someone else.
        unfinished: What interrupted saves left, or a save in another process writes.
    """

    saved: list[Saved]
    broken: dict[epath.Path, str]
    unfinished: list[epath.Path]


def as_absolute(name: str, path: str | os.PathLike[str]) -> epath.Path:
    """Returns a path that stays good when the working directory changes."""
    if not isinstance(path, str | os.PathLike):
        folder = f"/checkpoint_{path}" if isinstance(path, int) else ""
        raise TypeError(
            f"`{name}` is {path!r} of type {type(path).__name__}, but it must be a "
            f'path. Use a string such as `"runs/digits{folder}"`, or a `pathlib.Path`.'
        )
    text = check_path(name, path)
    return epath.Path(text if "://" in text else os.path.abspath(text))


def find_problem(directory: epath.Path) -> str | None:
    """Returns why nothing can be written to a directory, or `None` if it can."""
    if "://" in str(directory):
        return None
    place = directory
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        return (
            f"`directory` is {str(directory)!r}, and {str(place)!r} is a file, but "
            "checkpoints need a directory. Use the name of a directory, which is made "
            "if it does not exist."
        )
    if not os.access(place, os.W_OK | os.X_OK):
        return (
            f"`directory` is {str(directory)!r}, and this user may not write to "
            f"{str(place)!r}, but saving needs that. Use another directory, or change "
            f"its rights (`chmod u+rwx {place}`)."
        )
    return None


def check_is_checkpoint(folder: epath.Path, directory: epath.Path) -> None:
    """Raises if `folder` is not a complete checkpoint."""
    if read_header(folder) is not None:
        return
    if not folder.exists():
        reason = "which does not exist"
    elif not folder.is_dir():
        reason = "which is a file"
    else:
        reason = "a folder that is not a complete checkpoint of this library"
    found = find_checkpoints(folder) or find_checkpoints(directory)
    newest = ", ".join(repr(str(entry.path)) for entry in reversed(found[-3:]))
    advice = (
        f"Use one of these, newest first: {newest}."
        if newest
        else "Use the folder of a checkpoint, named `checkpoint_<number>`."
    )
    raise CheckpointError(
        f"`path` is {str(folder)!r}, {reason}, and only a complete checkpoint can be "
        f"restored. {advice}"
    )


def read_header(path: epath.Path) -> Header | None:
    """Returns the header of a complete checkpoint, or `None` if `path` is not one."""
    header = _read_header(path)
    return header if isinstance(header, Header) else None


def _read_header(path: epath.Path) -> Header | str:
    """Returns the header, or why there is no complete checkpoint."""
    name = f"`header/{HEADER_FILE}`"
    try:
        value = read_json(path / "header" / HEADER_FILE)
        if value.pop("format") != FORMAT or value.pop("version") not in _READABLE:
            return f"{name} is of another version of Armillary, or of another library"
        header = Header(**value)
        if not all(math.isfinite(value[key]) for key in _NUMBERS):
            return f"{name} is not what was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({type(error).__name__}: {error})"
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return f"{name} is not what was written"
    for item in ("manifest", "arrays") if header.has_arrays else ("manifest",):
        if not (path / item).is_dir():
            return f"`{item}` is missing"
    return header


def _find_mismatch(path: epath.Path, number: int, header: Header) -> str | None:
    """Returns why a header cannot be believed in a folder of this number, or `None`.

    The order of checkpoints depends on it.
    """
    name = f"header/{HEADER_FILE}"
    # Unusable sums are damage too, which a restore finds and names.
    with contextlib.suppress(ValueError, KeyError):
        damage = compare(path, name, read_checksums(path)[name])
        if damage is not None:
            return damage
    if header.number != number:
        return (
            f"`{name}` is that of checkpoint {header.number}, so another save was "
            "copied here, or the folder has another name than it had"
        )
    return None


def find_checkpoints(directory: epath.Path) -> list[Saved]:
    """Returns the complete checkpoints below `directory`, in the order of saving."""
    return list_directory(directory).saved


def list_directory(directory: epath.Path) -> Listing:
    """Returns what belongs to checkpoints in a directory, which need not exist."""
    listing = Listing([], {}, [])
    for path in directory.iterdir() if directory.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name):
            listing.unfinished.append(path)
        elif name := _NAME.fullmatch(path.name):
            header = _read_header(path)
            if isinstance(header, Header):
                header = _find_mismatch(path, int(name[1]), header) or header
            if isinstance(header, Header):
                listing.saved.append(Saved(path, header))
            elif _is_ours(path):
                listing.broken[path] = header
    listing.saved.sort(key=lambda entry: entry.header.serial)
    return listing


def _is_ours(path: epath.Path) -> bool:
    try:
        if not path.is_dir():
            return False
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        # Removed meanwhile, by the job that trains.
        return False
    except OSError:
        # Nobody can tell, and overlooking a checkpoint would be worse.
        return True
    ours = {"header", "manifest", "arrays", CHECKSUM_FILE}
    return not names or not names.isdisjoint(ours)


def choose_path(
    directory: epath.Path, number: int, saved: Sequence[Saved]
) -> epath.Path:
    """Returns a path for a checkpoint of this number that nothing has."""
    names = [_NAME.fullmatch(entry.path.name) for entry in saved]
    revisions = [int(name[2] or 0) for name in names if name and int(name[1]) == number]
    revision = max(revisions, default=-1) + 1
    while (path := directory / _make_name(number, revision)).exists():
        revision += 1  # Something that is no complete checkpoint has this name.
    return path


def _make_name(number: int, revision: int) -> str:
    return f"checkpoint_{number}.{revision}" if revision else f"checkpoint_{number}"


def find_superseded(saved: Sequence[Saved]) -> list[Saved]:
    """Returns checkpoints whose number was saved again."""
    newest = {entry.header.number: entry for entry in saved}
    return [entry for entry in saved if newest[entry.header.number] is not entry]


def find_expired(
    saved: Sequence[Saved],
    *,
    max_to_keep: int | None,
    keep_every_hours: float | None,
    preserved_at: float,
) -> tuple[list[Saved], float]:
    """Returns the checkpoints to remove, and the new `preserved_at`."""
    if max_to_keep is None:
        return [], preserved_at
    active = [entry for entry in saved if entry.header.saved_at > preserved_at]
    expired = []
    for entry in active[: max(0, len(active) - max_to_keep)]:
        age = entry.header.saved_at - preserved_at
        if keep_every_hours is not None and age >= 3600 * keep_every_hours:
            preserved_at = entry.header.saved_at
        else:
            expired.append(entry)
    return expired, preserved_at


def remove(path: epath.Path) -> None:
    """Removes a checkpoint in a way that never leaves half of one under its name."""
    renamed = path.parent / (path.name + _REMOVED_SUFFIX)
    path.rename(renamed)
    renamed.rmtree()


def remove_leftovers(directory: epath.Path) -> None:
    """Removes what interrupted saves and removals left behind."""
    for path in list(directory.iterdir()):
        if _LEFTOVER.fullmatch(path.name) and path.is_dir():
            path.rmtree()


def remove_unfinished(path: epath.Path) -> None:
    """Removes what a save that failed has written for the checkpoint at `path`."""
    for entry in list_directory(path.parent).unfinished:
        if entry.name.startswith(f"{path.name}.orbax") and entry.is_dir():
            entry.rmtree()
