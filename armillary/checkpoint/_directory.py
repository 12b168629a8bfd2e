"""The directory of a manager: its absolute path, and all that can be wrong with it."""

import os
import shutil
from collections.abc import Mapping

from etils import epath

from armillary.checkpoint import _folder
from armillary.errors import CheckpointError


def as_absolute(path: str | os.PathLike[str]) -> epath.Path:
    """Returns a path that stays good when the working directory changes."""
    text = os.fspath(path)
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
    """Raises if `folder` is not a complete checkpoint.

    Args:
        folder: What the caller wants to restore.
        directory: Where the message looks for checkpoints to name instead.

    Raises:
        CheckpointError: If there is no complete checkpoint at `folder`.
    """
    if _folder.read_header(folder) is not None:
        return
    if not folder.exists():
        reason = "which does not exist"
    elif not folder.is_dir():
        reason = "which is a file"
    else:
        reason = "a folder that is not a complete checkpoint of this library"
    found = _folder.find_checkpoints(folder) or _folder.find_checkpoints(directory)
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


def write_error(
    path: epath.Path, error: Exception, num_bytes: int | None, *, goes_on: bool
) -> CheckpointError:
    """Returns the error for a save that failed.

    Args:
        path: The folder that it was going to have.
        error: What happened.
        num_bytes: The size of its arrays, if they were looked at.
        goes_on: Whether the program goes on without it.
    """
    advice = (
        "This run goes on without it, and the next save that is due tries again."
        if goes_on
        else "Look at the space and the rights of its directory, and save again, or go "
        "on without such a save (`CheckpointManager(..., on_write_error='warn')`)."
    )
    return CheckpointError(
        f"Saving `{path}` failed: {type(error).__name__}: {error}. It is not complete, "
        f"and earlier checkpoints are as they were.{_describe_space(path, num_bytes)} "
        f"{advice}"
    )


def removal_error(path: epath.Path, error: Exception) -> CheckpointError:
    """Returns the error for old checkpoints that cannot be removed after a save."""
    return CheckpointError(
        f"`{path}` is complete, but removing older checkpoints beside it failed: "
        f"{type(error).__name__}: {error}. Look at the rights of the directory, or "
        "keep all of them (`max_to_keep=None`)."
    )


def read_error(path: epath.Path, error: Exception) -> CheckpointError:
    """Returns the error for a checkpoint without damage that cannot be read."""
    return CheckpointError(
        f"Reading `{path}` failed: {type(error).__name__}: {error}. Nothing was "
        "restored, and its files are as they were saved. Look at the memory of the "
        "devices, or use `manager.restore(path)` with another of "
        "`manager.checkpoints`."
    )


def describe_damage(path: epath.Path, damage: str) -> str:
    """Returns the message for a damaged checkpoint that was asked for by name."""
    return (
        f"`path` is {str(path)!r}, a damaged checkpoint: {damage}. Nothing was "
        "restored. Use another of `manager.checkpoints`, or "
        "`manager.restore_or_initialize()`, which takes the newest good one."
    )


def describe_all_damaged(
    directory: epath.Path, damaged: Mapping[epath.Path, str]
) -> str:
    """Returns the message for a directory without any good checkpoint."""
    lines = "\n".join(f"  {path}: {damage}" for path, damage in damaged.items())
    return (
        f"`directory` is {str(directory)!r}, and none of its {len(damaged)} "
        "checkpoints is as it was saved, but a run does not start from scratch over "
        f"what was there. Tried:\n{lines}\n"
        "Bring the files back, or move these folders away (or use another "
        "`directory`) to start afresh. Nothing was restored."
    )


def _describe_space(path: epath.Path, num_bytes: int | None) -> str:
    """Returns a sentence about the bytes needed and free, or nothing."""
    place = path.parent
    if num_bytes is None or "://" in str(path) or not place.is_dir():
        return ""
    free = shutil.disk_usage(place).free
    return (
        f" Its arrays need about {num_bytes / 1e6:.1f} MB, and `{place}` has "
        f"{free / 1e6:.1f} MB free."
    )
