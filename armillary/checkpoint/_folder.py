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
from typing import Any

from etils import epath

from armillary._checks import check_path
from armillary.checkpoint._disk import (
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
_HEADER = f"header/{HEADER_FILE}"
_NAME = re.compile(r"checkpoint_(\d+)(?:\.(\d+))?")
_REMOVED_SUFFIX = ".armillary-removed"
_UNFINISHED = re.compile(rf"{_NAME.pattern}\.orbax-checkpoint-tmp.*")
_LEFTOVER = re.compile(
    rf"{_UNFINISHED.pattern}|{_NAME.pattern}{re.escape(_REMOVED_SUFFIX)}"
)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A complete checkpoint, as its header describes it.

    Attributes:
        path: The folder.
        number: The number in the name of the folder.
        serial: Counts the saves of a directory, so a larger one is newer.
        saved_at: Seconds since the epoch, never falling from one save to the next.
        preserved_at: `saved_at` of the newest checkpoint that is kept for good, or when
            the directory was first used.
        has_arrays: Whether arrays belong to it.
    """

    path: epath.Path
    number: int
    serial: int
    saved_at: float
    preserved_at: float
    has_arrays: bool

    def as_json(self) -> dict[str, Any]:
        """Returns what the header says."""
        fields = {name: value for name, value in vars(self).items() if name != "path"}
        return {"format": FORMAT, "version": VERSION, **fields}


def as_absolute(name: str, path: str | os.PathLike[str]) -> epath.Path:
    """Returns a path that stays good when the working directory changes."""
    text = check_path(name, path)
    return epath.Path(text if "://" in text else os.path.abspath(text))


def check_is_writable(directory: epath.Path) -> None:
    """Raises if a local directory can neither be made nor written."""
    if "://" in str(directory):
        return
    place = directory
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        problem = f"{str(place)!r} is a file"
    elif not os.access(place, os.W_OK | os.X_OK):
        problem = f"this user may not write to {str(place)!r}"
    else:
        return
    raise ValueError(
        f"`directory` is {str(directory)!r}, and {problem}, but checkpoints need a "
        "directory that can be made and written. Use another one, or change its rights "
        f"(`chmod u+rwx {place}`)."
    )


def check_is_checkpoint(folder: epath.Path) -> None:
    """Raises if `folder` is not a complete checkpoint."""
    if read_saved(folder) is None:
        what = "is no complete checkpoint" if folder.exists() else "does not exist"
        raise CheckpointError(
            f"`path` is {str(folder)!r}, which {what}, but it must be the folder "
            "`checkpoint_<number>` of one. Use one of `manager.checkpoints`."
        )


def read_saved(path: epath.Path) -> Saved | None:
    """Returns what a complete checkpoint says of itself, or `None` if there is none."""
    saved = _read_header(path)
    return saved if isinstance(saved, Saved) else None


def _read_header(path: epath.Path) -> Saved | str:
    """Returns a checkpoint, or why there is no complete one."""
    try:
        value = read_json(path / _HEADER)
        if value.pop("format") != FORMAT or value.pop("version") not in _READABLE:
            return f"`{_HEADER}` is of another version of Armillary, or another library"
        saved = Saved(path, **value)
        numbers = (saved.number, saved.serial, saved.saved_at, saved.preserved_at)
        if not all(map(math.isfinite, numbers)):
            raise ValueError
    except FileNotFoundError:
        return f"`{_HEADER}` is missing"
    except OSError as error:
        return f"`{_HEADER}` cannot be read ({type(error).__name__}: {error})"
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return f"`{_HEADER}` is not what was written"
    for item in ("manifest", "arrays") if saved.has_arrays else ("manifest",):
        if not (path / item).is_dir():
            return f"`{item}` is missing"
    return saved


def _find_mismatch(saved: Saved, number: int) -> str | None:
    """Returns why a header cannot be believed in a folder of this number, or `None`.

    The order of checkpoints depends on it.
    """
    # Unusable sums are damage too, which a restore finds and names.
    with contextlib.suppress(ValueError, KeyError):
        damage = compare(saved.path, _HEADER, read_checksums(saved.path)[_HEADER])
        if damage is not None:
            return damage
    if saved.number != number:
        return f"`{_HEADER}` is that of checkpoint {saved.number}, copied or renamed"
    return None


def find_checkpoints(directory: epath.Path) -> list[Saved]:
    """Returns the complete checkpoints below `directory`, in the order of saving."""
    return list_directory(directory)[0]


def list_directory(
    directory: epath.Path,
) -> tuple[list[Saved], dict[epath.Path, str], list[epath.Path]]:
    """Returns what belongs to checkpoints in a directory, which need not exist.

    These are the complete ones, in the order of saving; what looks like one and is not
    complete, with reasons; and what interrupted saves left, or another process writes.
    """
    saved: list[Saved] = []
    broken: dict[epath.Path, str] = {}
    unfinished: list[epath.Path] = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name):
            unfinished.append(path)
        elif name := _NAME.fullmatch(path.name):
            found = _read_header(path)
            if isinstance(found, Saved):
                found = _find_mismatch(found, int(name[1])) or found
            if isinstance(found, Saved):
                saved.append(found)
            elif _is_ours(path):
                broken[path] = found
    saved.sort(key=lambda entry: entry.serial)
    return saved, broken, unfinished


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
    while True:
        suffix = f".{revision}" if revision else ""
        path = directory / f"checkpoint_{number}{suffix}"
        if not path.exists():
            return path
        revision += 1  # Something that is no complete checkpoint has this name.


def find_superseded(saved: Sequence[Saved]) -> list[Saved]:
    """Returns checkpoints whose number was saved again."""
    newest = {entry.number: entry for entry in saved}
    return [entry for entry in saved if newest[entry.number] is not entry]


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
    active = [entry for entry in saved if entry.saved_at > preserved_at]
    expired = []
    for entry in active[: max(0, len(active) - max_to_keep)]:
        age = entry.saved_at - preserved_at
        if keep_every_hours is not None and age >= 3600 * keep_every_hours:
            preserved_at = entry.saved_at
        else:
            expired.append(entry)
    return expired, preserved_at


def remove(path: epath.Path) -> None:
    """Removes a checkpoint in a way that never leaves half of one under its name."""
    renamed = path.parent / (path.name + _REMOVED_SUFFIX)
    path.rename(renamed)
    renamed.rmtree()


def remove_leftovers(directory: epath.Path, of: str = "checkpoint_") -> None:
    """Removes what interrupted saves and removals left, of names that begin so."""
    for path in list(directory.iterdir()):
        is_ours = path.name.startswith(of) and _LEFTOVER.fullmatch(path.name)
        if is_ours and path.is_dir():
            path.rmtree()
