"""Finds, names and removes the checkpoint folders of a directory.

A checkpoint is a folder `checkpoint_<number>` with a header. Numbers need not rise,
because a run may go back. So the checkpoints are ordered by the serial number in the
header, which counts saves. Saving a number again makes
`checkpoint_<number>.<revision>`, and removes the older folder afterwards. So a complete
checkpoint exists at every moment, and no folder is overwritten.

A checkpoint is written below an unfinished name, and renamed when it is complete. An
object store cannot rename folders. There, a checkpoint counts once the list of
checksums exists, which is written last.
"""

import atexit
import contextlib
import dataclasses
import functools
import glob
import json
import os
import re
import secrets
import shutil
import string
import tempfile
from collections.abc import Sequence
from time import time
from typing import Any

from etils import epath

from armillary._checks import check_path
from armillary._optional import import_optional
from armillary.checkpoint._checksums import (
    BAD_JSON,
    CHECKSUM_FILE,
    compare,
    read_checksums,
)
from armillary.checkpoint._storage import (
    find_files,
    is_remote,
    keep_no_listings,
    list_entries,
)
from armillary.errors import CheckpointError

FORMAT = "armillary-checkpoint"
VERSION = 3
_READABLE = (2, VERSION)
HEADER = "header/header.json"
_NAME = re.compile(r"checkpoint_(\d+)(?:\.(\d+))?")
_UNFINISHED = ".orbax-checkpoint-tmp"
# Marks a checkpoint in an object store that is not complete yet.
_UNFINISHED_FILE = "unfinished"
_REMOVED_SUFFIX = ".armillary-removed"
_LEFTOVER = re.compile(
    rf"{_NAME.pattern}({re.escape(_UNFINISHED)}.*|{re.escape(_REMOVED_SUFFIX)})"
)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A complete checkpoint, as its header describes it."""

    path: epath.Path
    number: int
    serial: int  # The number of this save in its directory; newer saves are larger.
    saved_at: float  # Seconds since the epoch, which never decrease.
    # `saved_at` of the newest checkpoint that is kept for good, or else the time when
    # the directory was first used.
    preserved_at: float
    has_arrays: bool

    def as_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "path"}
        return {"format": FORMAT, "version": VERSION, **fields}


def as_absolute(name: str, path: str | os.PathLike[str]) -> epath.Path:
    """Returns a path that stays valid when the working directory changes."""
    return epath.Path(check_path(name, path))


def as_checkpoint(name: str, path: str | os.PathLike[str]) -> epath.Path:
    """Returns the absolute path of a checkpoint.

    Raises:
        TypeError: If it is not a path, such as `None` of a manager without one.
    """
    if path is None:
        raise TypeError(
            f"`{name}` is None, but it must be the path of a checkpoint. "
            "`manager.latest_checkpoint` and `manager.best_checkpoint` are None if "
            "`manager.directory` has no such checkpoint: compare that path, or train "
            "first."
        )
    return as_absolute(name, path)


def as_place(name: str, path: str | os.PathLike[str]) -> epath.Path:
    """Returns the absolute path of checkpoints.

    Raises:
        ImportError: If the package for the object store is missing.
        ValueError: If checkpoints cannot be written there.
    """
    place = as_absolute(name, path)
    if not is_remote(place):
        return place
    scheme, _, _ = str(place).partition("://")
    if scheme != "gs":
        raise ValueError(
            f"`{name}` is {str(place)!r}, but Orbax writes checkpoints only to file "
            "systems and to `gs://`. Mount the bucket as a file system, or use a "
            "folder of this machine and copy it."
        )
    import_optional("gcsfs", f"`gcsfs`, which `{name}={str(place)!r}` needs,", "gcs")
    keep_no_listings()
    return place


def as_plain(path: epath.Path) -> epath.Path:
    """Returns the same place under a path that Orbax can write to and read from.

    Orbax looks for its own files by patterns (`directory.glob`, 0.12.8). In a pattern,
    the brackets of a name such as `lr=[0.1,0.2]` stand for a set of characters. So
    Orbax would not find its files, and leave a checkpoint that nobody can read.
    """
    if is_remote(path) or not _has_pattern(str(path)):
        return path
    if _has_pattern(path.name):  # `Checkpoint.write` takes any name.
        return epath.Path(_make_link(str(path)))
    # All checkpoints of a directory share its link.
    return epath.Path(_make_link(str(path.parent))) / path.name


def _has_pattern(text: str) -> bool:
    return glob.escape(text) != text or "\\" in text


@functools.cache
def _make_link(directory: str) -> str:
    """Returns a link to a directory, which lasts as long as the process."""
    folder = tempfile.mkdtemp(prefix="armillary-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    link = os.path.join(folder, "run")
    os.symlink(directory, link)
    return link


def read_header(path: epath.Path) -> Saved | str:
    """Returns a checkpoint, or the reason why there is no complete one."""
    try:
        # The header is verified, because the order of checkpoints depends on it. If the
        # checksums cannot be used, a restore reports this damage.
        with contextlib.suppress(ValueError, KeyError):
            damage = compare(path, HEADER, read_checksums(path)[HEADER])
            if damage is not None:
                return damage
        if is_remote(path) and not (path / CHECKSUM_FILE).exists():
            return f"`{CHECKSUM_FILE}`, which is written last, is missing"
        value = json.loads((path / HEADER).read_bytes())
        if value.pop("format") != FORMAT:
            return f"`{HEADER}` is of another library"
        version = value.pop("version")
        if version not in _READABLE:
            readable = " and ".join(map(str, _READABLE))
            return (
                f"`{HEADER}` is of another version of Armillary: it has the format "
                f"{version}, and this release reads the formats {readable}"
            )
        saved = Saved(path, **value)
    except FileNotFoundError:
        return f"`{HEADER}` is missing"
    except OSError as error:
        return f"`{HEADER}` cannot be read ({type(error).__name__}: {error})"
    except BAD_JSON:
        return f"`{HEADER}` has changed since it was written"
    items = ["manifest"]
    if saved.has_arrays:
        items.append("arrays")
    for item in items:
        if not (path / item).is_dir():
            return f"`{item}` is missing"
    return saved


def list_directory(
    directory: epath.Path,
) -> tuple[list[Saved], dict[epath.Path, str]]:
    """Returns complete checkpoints in the order of saving, and problems of others."""
    saved: list[Saved] = []
    broken: dict[epath.Path, str] = {}
    for path in list_entries(directory):
        name = _NAME.fullmatch(path.name)
        if name is None:
            continue
        if _is_unfinished(path):
            continue
        found = read_header(path)
        if isinstance(found, Saved) and found.number != int(name[1]):
            found = f"`{HEADER}` belongs to checkpoint {found.number}"
        if isinstance(found, Saved):
            saved.append(found)
        elif _is_ours(path):
            broken[path] = found
    saved.sort(key=lambda entry: entry.serial)
    return saved, broken


def _is_ours(path: epath.Path) -> bool:
    try:
        names = {entry.name for entry in path.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return False  # It is a file, or the training job has just removed it.
    except OSError:
        return True  # Unknown, and overlooking a checkpoint would be worse.
    ours = {"header", "manifest", "arrays", CHECKSUM_FILE}
    return not names or not names.isdisjoint(ours)


def find_checkpoints(directory: epath.Path) -> list[Saved]:
    """Returns the complete checkpoints in the order of saving, one for each number."""
    saved, _ = list_directory(directory)
    newest = {entry.number: entry for entry in saved}
    return [entry for entry in saved if newest[entry.number] is entry]


def find_all(directory: epath.Path) -> list[Saved]:
    """Returns the complete checkpoints with any name, in the order of saving."""
    found: list[Saved] = []
    for path in list_entries(directory):
        is_leftover = _UNFINISHED in path.name or _REMOVED_SUFFIX in path.name
        if is_leftover or not (path / HEADER).exists():
            continue
        saved = read_header(path)
        if isinstance(saved, Saved):
            found.append(saved)
    return sorted(found, key=lambda entry: entry.saved_at)


def number_after(prefix: epath.Path) -> int:
    """Returns the next number for a name that begins with a prefix, from 1."""
    rule = re.compile(rf"{re.escape(prefix.name)}-(\d+)(\..*)?")
    folder = prefix.parent
    last = 0
    for path in list_entries(folder):
        match = rule.fullmatch(path.name)
        if match is not None:
            last = max(last, int(match[1]))
    return last + 1


def describe_new(path: epath.Path, number: int) -> Saved:
    """Returns the header for a checkpoint that no manager writes."""
    if path.exists():
        raise CheckpointError(
            f"`path` is {str(path)!r}, which exists, and a checkpoint is never "
            "overwritten. Remove it, use another path, or write "
            "`checkpoint.save(prefix)`, which counts."
        )
    name = _NAME.fullmatch(path.name)
    if name is not None:
        number = int(name[1])  # as a manager of this directory would find it
    earlier = find_all(path.parent)
    saved_at = time()
    if earlier:
        # Times are compared, so they must rise strictly, even if a clock is set back.
        saved_at = max(saved_at, earlier[-1].saved_at + 1e-3)
    serial = max((entry.serial for entry in earlier), default=0) + 1
    return Saved(path, number, serial, saved_at, saved_at, has_arrays=True)


def make_unfinished(path: epath.Path) -> epath.Path:
    """Makes the folder in which a checkpoint is written until it is complete."""
    if is_remote(path):
        (path / _UNFINISHED_FILE).write_text("")
        return path
    # Letters only, so that a pattern such as `checkpoint_*[0-9]` does not match.
    token = "".join(secrets.choice(string.ascii_lowercase) for _ in range(8))
    folder = path.parent / f"{path.name}{_UNFINISHED}-{token}"
    folder.mkdir(parents=True)
    return folder


def remove_unfinished(path: epath.Path) -> None:
    """Removes the files that a failed save of this folder has left.

    In an object store, late files may still arrive. So the next save removes them.
    """
    for left in list_entries(path.parent):
        if left.name.startswith(path.name + _UNFINISHED):
            left.rmtree()


def _is_unfinished(path: epath.Path) -> bool:
    """Returns whether a folder of an object store is of an interrupted save."""
    if not is_remote(path) or (path / CHECKSUM_FILE).exists():
        return False
    return (path / _UNFINISHED_FILE).exists()


def complete(unfinished: epath.Path, path: epath.Path) -> None:
    """Gives a folder its final name, once all of its files are on the disk."""
    if is_remote(path):
        (path / _UNFINISHED_FILE).unlink()
    else:
        unfinished.rename(path)


def choose_path(
    directory: epath.Path, number: int, saved: Sequence[Saved]
) -> epath.Path:
    """Returns an unused path for a checkpoint of this number."""
    revision = 0
    for entry in saved:
        name = _NAME.fullmatch(entry.path.name)
        if name is not None and int(name[1]) == number:
            revision = max(revision, int(name[2] or 0) + 1)
    while True:
        suffix = f".{revision}" if revision else ""
        path = directory / f"checkpoint_{number}{suffix}"
        if not path.exists():
            return path
        revision += 1  # A folder that is not a complete checkpoint has this name.


def remove(path: epath.Path) -> None:
    """Removes a checkpoint so that its name never stands for half a checkpoint."""
    if is_remote(path):
        # ORDER: an interrupted removal must look like an interrupted save.
        (path / _UNFINISHED_FILE).write_text("")
        (path / CHECKSUM_FILE).unlink()
        _remove_unfinished_objects(path)
        return
    renamed = path.parent / (path.name + _REMOVED_SUFFIX)
    path.rename(renamed)
    renamed.rmtree()


def remove_leftovers(directory: epath.Path) -> None:
    """Removes leftovers of interrupted saves and removals."""
    for path in list_entries(directory):
        if _NAME.fullmatch(path.name) and _is_unfinished(path):
            _remove_unfinished_objects(path)
        elif _LEFTOVER.fullmatch(path.name) and path.is_dir():
            path.rmtree()


def _remove_unfinished_objects(path: epath.Path) -> None:
    """Removes a folder of an object store."""
    for file in find_files(path):
        if file.name != _UNFINISHED_FILE:
            file.unlink()
    # ORDER: last, so that the next save continues a removal that is interrupted.
    (path / _UNFINISHED_FILE).unlink()
