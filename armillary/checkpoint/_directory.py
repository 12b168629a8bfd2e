"""The directory of a manager: its absolute path, and what keeps it from being used."""

import os

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


def write_error(path: epath.Path, error: Exception) -> CheckpointError:
    """Returns the error for a save that failed."""
    return CheckpointError(
        f"Saving `{path}` failed: {type(error).__name__}: {error}. It is not complete, "
        "and earlier checkpoints are as they were. Look at the space and the rights of "
        "its directory, and save again."
    )


def read_error(path: epath.Path, error: Exception) -> CheckpointError:
    """Returns the error for a checkpoint that cannot be read."""
    return CheckpointError(
        f"Reading `{path}` failed: {type(error).__name__}: {error}. Nothing was "
        "restored. If it is damaged, move it away to resume from the one before it, or "
        "use `manager.restore(path)` with another of `manager.checkpoints`."
    )
