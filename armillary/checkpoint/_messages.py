"""The messages for a checkpoint that cannot be written, read or restored."""

import operator
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from etils import epath

from armillary._checks import list_lines
from armillary.checkpoint._leaf import LeafSpec
from armillary.errors import CheckpointError, CheckpointMismatchError


def check_match(
    path: str,
    *,
    saved: Mapping[str, LeafSpec],
    program: Mapping[str, LeafSpec],
    saved_states: Collection[str],
    program_states: Collection[str],
) -> None:
    """Raises if a checkpoint and a program do not hold the same leaves and states.

    Args:
        path: The checkpoint, for the message.
        saved: The leaves of the checkpoint.
        program: The leaves of the program.
        saved_states: Names of the objects whose `get_state` was saved.
        program_states: Names of the objects of the program that have `set_state`.

    Raises:
        CheckpointMismatchError: If they differ. All differences are in the message.
    """
    lines = find_differences(saved, program, saved_states, program_states)
    if not lines:
        return
    raise CheckpointMismatchError(
        f"`path` is {path!r}, and {len(lines)} of its leaves differ from the program, "
        f"which must hold the same ones:\n{list_lines(lines)}\n"
        "Build the objects as they were when this was saved, restore another "
        "checkpoint (`manager.restore(path)`) or only a part of this one "
        "(`manager.restore_part(path, parts)`), or use another `directory` to start "
        "afresh. Nothing was restored."
    )


def find_differences(
    saved: Mapping[str, LeafSpec],
    program: Mapping[str, LeafSpec],
    saved_states: Collection[str],
    program_states: Collection[str],
) -> list[str]:
    """Returns a line for each path at which a checkpoint and a program differ."""
    differences = [
        *_compare(saved, program, LeafSpec.matches),
        *_compare(
            dict.fromkeys(saved_states, "saved state"),
            dict.fromkeys(program_states, "saved state"),
            operator.eq,
        ),
    ]
    return [line for _, line in sorted(differences)]


def _compare(
    saved: Mapping[str, Any],
    program: Mapping[str, Any],
    matches: Callable[[Any, Any], bool],
) -> Iterator[tuple[str, str]]:
    """Yields each path that differs, and a line that says how."""
    for path in saved.keys() | program.keys():
        if path not in program:
            yield path, f"- {path}: {saved[path]}  only in the checkpoint"
        elif path not in saved:
            yield path, f"+ {path}: {program[path]}  only in the program"
        elif not matches(saved[path], program[path]):
            both = f"{saved[path]} in the checkpoint, {program[path]} in the program"
            yield path, f"~ {path}: {both}"


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
