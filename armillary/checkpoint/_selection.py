"""Which values of a checkpoint go where in a program, and which may be left out.

A part is named by a path, and is everything at that path or below it: `model/backbone`
has `model/backbone/kernel`; `*` stands for any one name between slashes. All names are
paths of the program; `rename` says which of them a checkpoint calls otherwise. What is
selected must be the same in both, except in parts that may differ: each of those is
restored whole, or stays whole as the program made it.

The messages for a checkpoint that cannot be written, read or restored.
"""

import dataclasses
import difflib
import itertools
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from armillary._checks import list_lines
from armillary._format import format_bytes
from armillary._logging import logger
from armillary.checkpoint._leaf import LeafSpec
from armillary.errors import CheckpointError, CheckpointMismatchError

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
        f" Its arrays need about {format_bytes(num_bytes)}, and `{place}` has "
        f"{format_bytes(free)} free."
    )


Paths = str | Iterable[str]
"""One path, or several."""

Specs = Mapping[str, LeafSpec | str]
"""What is at each path: a leaf, or the state of an object."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """What of a checkpoint to restore: the arguments of `Checkpoint.read`."""

    only: tuple[str, ...] | None = None
    skip: tuple[str, ...] = ()
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    may_differ: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether everything is to be restored."""
        return self.only is None and not self.skip

    def has(self, path: str) -> bool:
        """Returns whether a path of the program is to be restored."""
        is_named = self.only is None or is_inside(path, self.only)
        return is_named and not is_inside(path, self.skip)


class Match(NamedTuple):
    """Where the values of a program come from.

    Attributes:
        sources: The path in the checkpoint of what is restored, by that in the program.
        differences: A line for each path of a part that differs and may do so.
    """

    sources: dict[str, str]
    differences: tuple[str, ...]


def make_selection(
    *,
    only: Paths | None = None,
    skip: Paths = (),
    rename: Mapping[str, str] | None = None,
    may_differ: Paths = (),
) -> Selection:
    """Returns the selection that the arguments of a user describe."""
    pairs = {} if rename is None else rename
    if not isinstance(pairs, Mapping):
        raise TypeError(
            f"`rename` is {rename!r} of type {type(rename).__name__}, but it must be a "
            "dictionary from paths in the checkpoint to paths in the program. Use "
            '`rename={"model/encoder": "model/backbone"}`.'
        )
    parts = None if only is None else as_paths("only", only)
    if parts == ():
        raise ValueError(
            f"`only` is {only!r}, which names nothing to restore. Name a part, such as "
            '`only="model"`, or leave it out for everything.'
        )
    names = as_paths("rename", pairs.keys()), as_paths("rename", pairs.values())
    return Selection(
        only=parts,
        skip=as_paths("skip", skip),
        rename=dict(zip(*names, strict=True)),
        may_differ=as_paths("may_differ", may_differ),
    )


def as_paths(argument: str, paths: Any) -> tuple[str, ...]:
    """Returns paths without slashes at their ends."""
    names: list[Any] = [paths]
    if np.iterable(paths) and not isinstance(paths, str | bytes | Mapping):
        names = list(paths)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"`{argument}` is {paths!r} of type {type(paths).__name__}, but it must be "
            f"a path or several. Use `{argument}="
            '"model/backbone"` or `["model", "optimizer/opt_state"]`.'
        )
    stripped = tuple(name.strip("/") for name in names)
    if not all(map(str.strip, stripped)):
        raise ValueError(
            f"`{argument}` is {paths!r}, in which a path is empty, but a path names a "
            "part. Use one such as `model` or `model/backbone`."
        )
    return stripped


def match(path: str, selection: Selection, *, saved: Specs, program: Specs) -> Match:
    """Returns where the selected values of a program come from."""
    sources = _rename(path, selection, saved)
    _check_names(path, selection, sources, program)
    _warn_of_slips(path, selection, [*sources, *program])
    differences = find_differences(
        {new: saved[old] for new, old in sources.items() if selection.has(new)},
        {name: spec for name, spec in program.items() if selection.has(name)},
    )
    matching = {
        name
        for name in sources.keys() & program.keys() - differences.keys()
        if selection.has(name)
    }
    refused = {
        name: line
        for name, line in differences.items()
        if not is_inside(name, selection.may_differ)
    }
    if refused:
        raise CheckpointMismatchError(
            describe_mismatch(path, refused, matching, is_whole=selection.is_whole)
        )
    left = {
        parts_with(name)[part.count("/")]
        for part in selection.may_differ
        for name in differences
        if is_inside(name, [part])
    }
    taken = sorted(name for name in matching if not is_inside(name, left))
    if not taken:
        raise CheckpointMismatchError(describe_nothing(path, differences))
    lines = tuple(differences[name] for name in sorted(differences))
    return Match({name: sources[name] for name in taken}, lines)


def is_inside(path: str, parts: Iterable[str]) -> bool:
    """Returns whether a path is one of some parts, or lies in one."""
    return any(_below(path, part) is not None for part in parts)


def _rename(path: str, selection: Selection, saved: Specs) -> dict[str, str]:
    # To the path in the program, from that in the checkpoint.
    for old in selection.rename:
        _check_is_there(path, f"`rename` names {old!r}", "the checkpoint", old, saved)
    found: dict[str, str] = {}
    for name in saved:
        new = name
        # The longest part that has it: `a/b` is more exact than `a`.
        for old in sorted(selection.rename, key=len):
            rest = _below(name, old)
            new = new if rest is None else selection.rename[old] + rest
        if new in found and selection.has(new):
            raise CheckpointMismatchError(
                f"`path` is {path!r}, and `rename` is {dict(selection.rename)}, with "
                f"which {found[new]!r} and {name!r} of the checkpoint both have the "
                f"path {new!r}, but each must have its own. Rename the other one as "
                "well, and `skip` it. Nothing was restored."
            )
        found[new] = name
    return found


def _check_names(
    path: str, selection: Selection, saved: Collection[str], program: Collection[str]
) -> None:
    # A name of nothing would be a slip of the pen.
    for part in selection.only or ():
        named = f"{part!r} is to be restored"
        _check_is_there(path, named, "the program", part, program)
        if not is_inside(part, selection.may_differ):
            _check_is_there(path, named, "the checkpoint", part, saved)
    for part in selection.skip:
        named, both = f"`skip` names {part!r}", [*saved, *program]
        _check_is_there(path, named, "neither program nor checkpoint", part, both)


def _warn_of_slips(path: str, selection: Selection, names: Collection[str]) -> None:
    """Warns of parts that may differ and are nowhere.

    It is no error: once a part is gone, so that a run goes on without it, it is in the
    checkpoints of that run no more.
    """
    parts = sorted({part for name in names for part in parts_with(name)})
    for part in selection.may_differ:
        if not _any_below(names, part):
            near = [each for each in parts if each.endswith(f"/{part}")]
            near = near or difflib.get_close_matches(part, parts)
            shown = f" There is {', '.join(map(repr, near[:3]))}." if near else ""
            logger.warning(
                "`may_differ` names %r, which neither the program nor `%s` has.%s "
                "Leave it out if it is gone since an earlier change.",
                part,
                path,
                shown,
            )


def _check_is_there(
    path: str, named: str, where: str, part: str, names: Collection[str]
) -> None:
    if _any_below(names, part):
        return
    above = [each for each in parts_with(part) if _any_below(names, each)]
    beside = {
        parts_with(name)[: len(above) + 1][-1]
        for name in names
        if not above or is_inside(name, above[-1:])
    }
    has = "has" if where.startswith("neither") else "does not have"
    raise CheckpointMismatchError(
        f"`path` is {path!r}, and {named}, which {where} {has}. There is:\n"
        f"{list_lines(sorted(beside))}\n"
        "Use one of these, or a path below it; if the checkpoint calls it otherwise, "
        "say so (`rename={'path in the checkpoint': 'path in the program'}`). Nothing "
        "was restored."
    )


def _any_below(names: Iterable[str], part: str) -> bool:
    return any(_below(name, part) is not None for name in names)


def _below(path: str, part: str) -> str | None:
    """Returns what follows `part` in a path, or `None` if it lies elsewhere."""
    names, wanted = path.split("/"), part.split("/")
    head = names[: len(wanted)]
    fits = len(head) == len(wanted) and all(
        want in ("*", name) for name, want in zip(head, wanted, strict=True)
    )
    return "".join(f"/{name}" for name in names[len(wanted) :]) if fits else None
