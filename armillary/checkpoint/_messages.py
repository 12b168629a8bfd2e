"""The messages for a checkpoint that cannot be written, read or restored."""

import itertools
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping

from etils import epath

from armillary._checks import list_lines
from armillary.checkpoint._leaf import LeafSpec
from armillary.errors import CheckpointError

_MOST_PARTS = 8


def describe_mismatch(
    path: str,
    differences: Mapping[str, str],
    matching: Collection[str],
    *,
    is_whole: bool,
) -> str:
    """Returns the message for a checkpoint and a program that do not fit each other."""
    fix = "what to restore (`only`, `skip`), or what has another path (`rename`)"
    if matching:
        names = _find_parts(differences, matching)
        shown = repr(names[0]) if len(names) == 1 else repr(names)
        fix = f"what may stay as the program makes it (`may_differ={shown}`), {fix}"
    if is_whole and all(line.startswith("-") for line in differences.values()):
        fix += (
            "; `checkpoint.read(path)` needs nothing else than the objects of "
            "`checkpoint`"
        )
    leaves = "of its leaves" if is_whole else "leaves of what is to be restored"
    afresh = ", or use another `directory` to start afresh" if is_whole else ""
    return (
        f"`path` is {path!r}, and {len(differences)} {leaves} differ from the "
        f"program, which must hold the same ones{'' if is_whole else ' there'}:\n"
        f"{list_lines(differences[name] for name in sorted(differences))}\n"
        f"Build the objects as they were when this was saved{afresh}. If they changed "
        f"on purpose, name {fix}. Nothing was restored."
    )


def describe_nothing(path: str, differences: Mapping[str, str]) -> str:
    """Returns the message for a restore that would restore nothing."""
    lines = [differences[name] for name in sorted(differences)]
    differ = f" All of it differs:\n{list_lines(lines)}\n" if lines else " "
    return (
        f"`path` is {path!r}, and nothing of it would be restored, but a restore must "
        f"restore something.{differ}Name what fits in `only`, and less in `skip` and "
        "`may_differ`. Nothing was restored."
    )


def _find_parts(differing: Iterable[str], matching: Collection[str]) -> list[str]:
    """Returns the largest parts that have some of `differing` and none of `matching`.

    Of many, the first few.
    """
    above = {part for name in matching for part in parts_with(name)}
    parts = {
        next((part for part in parts_with(name) if part not in above), name)
        for name in differing
    }
    return sorted(parts)[:_MOST_PARTS]


def parts_with(path: str) -> list[str]:
    """Returns the parts that a path lies in, the largest first, and the path itself."""
    return list(itertools.accumulate(path.split("/"), "{}/{}".format))


def find_differences(
    saved: Mapping[str, LeafSpec | str], program: Mapping[str, LeafSpec | str]
) -> dict[str, str]:
    """Returns a line for each path at which a checkpoint and a program differ."""
    lines: dict[str, str] = {}
    for path in saved.keys() | program.keys():
        if path not in program:
            lines[path] = f"- {path}: {saved[path]}  only in the checkpoint"
        elif path not in saved:
            lines[path] = f"+ {path}: {program[path]}  only in the program"
        elif not _fits(saved[path], program[path]):
            both = f"{saved[path]} in the checkpoint, {program[path]} in the program"
            lines[path] = f"~ {path}: {both}"
    return lines


def _fits(saved: LeafSpec | str, program: LeafSpec | str) -> bool:
    if isinstance(saved, LeafSpec) and isinstance(program, LeafSpec):
        return saved.matches(program)
    return saved == program


def write_error(
    path: epath.Path, error: Exception, num_bytes: int | None, *, goes_on: bool
) -> CheckpointError:
    """Returns the error for a save that failed; of `num_bytes`, if that is known."""
    advice = (
        "This run goes on without it, and the next save that is due tries again."
        if goes_on
        else "Look at the space and the rights of its directory, and save again, or go "
        "on without such a save (`CheckpointManager(..., on_write_error='warn')`)."
    )
    error = as_disk_error(error) or error
    return CheckpointError(
        f"Saving `{path}` failed: {type(error).__name__}: {error}. It is not complete, "
        f"and earlier checkpoints are as they were.{_describe_space(path, num_bytes)} "
        f"{advice}"
    )


def as_disk_error(error: Exception) -> OSError | None:
    """Returns the error of the operating system that an error is, or repeats."""
    if isinstance(error, OSError):
        return error
    code = re.search(r"os_error_code='(\d+)'", str(error))  # Of TensorStore.
    return OSError(int(code[1]), os.strerror(int(code[1]))) if code else None


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
        f" Its arrays need about {_as_text(num_bytes)}, and `{place}` has "
        f"{_as_text(free)} free."
    )


def _as_text(num_bytes: int) -> str:
    if num_bytes < 1e5:
        return f"{math.ceil(num_bytes / 1e3)} kB"
    return f"{num_bytes / 1e6:.1f} MB"
