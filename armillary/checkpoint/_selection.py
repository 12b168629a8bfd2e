"""Selects values of a checkpoint, and their places in the program.

A part is named by a path, and is everything at that path or below it. Selected parts
must have the same leaves on both sides, except parts that may differ. Such a part is
either restored completely, or stays completely as the program made it.
"""

import difflib
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Self

from armillary._checks import list_lines
from armillary.errors import CheckpointMismatchError

Paths = str | list[str] | tuple[str, ...] | set[str]
# The value at each path: dtype and shape of a leaf, or the state of an object.
Specs = Mapping[str, str]


class RestoreReport(NamedTuple):
    """The paths that a restore has read, kept or skipped; `print` shows all of them.

    It has the methods of the status object that `tf.train.Checkpoint.read` returns, so
    the lines of TensorFlow's guides run::

        armillary.Checkpoint(model=model).read(path).expect_partial()

    Attributes:
        path: The checkpoint; empty if there was none to restore.
        restored: Paths of the program that have the values of the checkpoint now.
        kept: Paths of the program that were not restored.
        unused: Paths of the checkpoint that were not used.
        differences: A line for each difference in a part of `may_differ`, which was
            therefore not restored.
    """

    path: str
    restored: tuple[str, ...]
    kept: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.path:
            return "There was no checkpoint to restore."
        is_whole = not (self.kept or self.unused)
        lines = [f"{'All' if is_whole else 'A part'} of {self.path}:"]
        for title, entries in (
            ("restored", self.restored),
            ("of the program, left as they were", self.kept),
            ("of the checkpoint, not used", self.unused),
        ):
            lines.append(f"{len(entries)} {title}{':' if entries else '.'}")
            if entries:
                lines.append(list_lines(entries))
        if self.differences:
            lines += [
                "Differences that `may_differ` allows:",
                list_lines(self.differences),
            ]
        return "\n".join(lines)

    def expect_partial(self) -> Self:
        """Returns this report, also if parts of the checkpoint were not used.

        In TensorFlow, this call allows a partial restore. Here, it changes nothing,
        because `Checkpoint.read` always restores only the objects that it names.
        """
        return self

    def assert_existing_objects_matched(self) -> Self:
        """Returns this report if every array of the program was restored.

        Raises:
            CheckpointMismatchError: If an array of the program was not restored.
        """
        if self.kept:
            raise CheckpointMismatchError(
                f"`assert_existing_objects_matched` found {len(self.kept)} arrays of "
                f"the program that were not restored:\n{list_lines(self.kept)}\n"
                "Restore a checkpoint that has them, or leave this call out. The "
                f"report of the restore:\n{self}"
            )
        return self

    def assert_consumed(self) -> Self:
        """Returns this report if the checkpoint and the program matched completely.

        Raises:
            CheckpointMismatchError: If an array of the checkpoint was not used, or an
                array of the program was not restored.
        """
        if self.unused:
            raise CheckpointMismatchError(
                f"`assert_consumed` found {len(self.unused)} arrays of the checkpoint "
                f"that were not used:\n{list_lines(self.unused)}\n"
                "Name all objects that were saved in `Checkpoint(...)`, or write "
                f"`expect_partial()` instead. The report of the restore:\n{self}"
            )
        return self.assert_existing_objects_matched()


class Selection(NamedTuple):
    """The parts of a checkpoint to restore: the arguments of `Checkpoint.read`."""

    only: tuple[str, ...] | None = None
    skip: tuple[str, ...] = ()
    may_differ: tuple[str, ...] = ()

    def has(self, path: str) -> bool:
        is_named = self.only is None or is_inside(path, self.only)
        return is_named and not is_inside(path, self.skip)


def as_paths(argument: str, paths: Any) -> tuple[str, ...]:
    """Returns paths without slashes at their ends."""
    is_list = isinstance(paths, list | tuple | set)
    names = tuple(paths) if is_list else (paths,)
    if not all(isinstance(name, str) and name.strip("/ ") for name in names):
        raise ValueError(
            f"`{argument}` is {paths!r}, but it must be a path, or a list of paths, "
            f'and no path may be empty. Use `{argument}="model/backbone"`.'
        )
    return tuple(name.strip("/") for name in names)


def match(
    path: str, selection: Selection, *, saved: Specs, program: Specs
) -> tuple[list[str], tuple[str, ...]]:
    """Returns the paths to restore, and a line for each allowed difference."""
    _check_names(path, selection, [*saved, *program])
    old = {name: spec for name, spec in saved.items() if selection.has(name)}
    own = {name: spec for name, spec in program.items() if selection.has(name)}
    differences = _find_differences(old, own)
    matching = old.keys() & own.keys() - differences.keys()
    allowed = selection.may_differ
    refused = {n: line for n, line in differences.items() if not is_inside(n, allowed)}
    if refused:
        fix = _find_renamed(saved, program)
        if fix is None and matching:
            parts = _find_parts(refused, matching)
            fix = f"name the parts that may differ: `may_differ={parts!r}`"
        elif fix is None:
            fix = "name the parts to restore: `only=[...]`"
        raise CheckpointMismatchError(
            f"`path` is {path!r}, and {len(refused)} leaves differ between it and the "
            f"program, but they must be the same:\n{list_lines(refused.values())}\n"
            "Build the objects in the same way as at the save. If they changed on "
            f"purpose, {fix}. For a new run, use a new directory. Nothing was restored."
        )

    left: list[str] = []
    for part in allowed:
        if any(is_inside(name, [part]) for name in differences):
            left.append(part)
    taken = sorted(name for name in matching if not is_inside(name, left))
    lines = tuple(differences.values())
    if not taken:
        raise CheckpointMismatchError(
            f"`path` is {path!r}, and nothing of it would be restored. Add a matching "
            "path to `only`, or remove paths from `skip` and `may_differ`. "
            f"Differences:\n{list_lines(lines) or '  none'}"
        )
    return taken, lines


def _find_differences(saved: Specs, program: Specs) -> dict[str, str]:
    """Returns a line for each path at which a checkpoint and a program differ."""
    lines: dict[str, str] = {}
    for path in sorted(saved.keys() | program.keys()):
        old = saved.get(path)
        own = program.get(path)
        if own is None:
            lines[path] = f"- {path}: {old}  only in the checkpoint"
        elif old is None:
            lines[path] = f"+ {path}: {own}  only in the program"
        elif old != own:
            lines[path] = f"~ {path}: {old} in the checkpoint, {own} in the program"
    return lines


def _find_renamed(saved: Specs, program: Specs) -> str | None:
    """Returns the advice for an object that has a similar name in the checkpoint."""
    saved_names = {path.partition("/")[0] for path in saved}
    own_names = {path.partition("/")[0] for path in program}
    fix = None
    for name in own_names - saved_names:
        unused = saved_names - own_names
        for other in difflib.get_close_matches(name, unused, n=1):
            fix = f"use the saved name: `Checkpoint({other}=...)`, not `{name}`"
    return fix


def _find_parts(differing: Iterable[str], matching: Collection[str]) -> Any:
    """Returns the first few of the largest parts that hold only `differing` paths."""
    above: set[str] = set()
    for name in matching:
        above.update(_parts_with(name))
    parts: set[str] = set()
    for name in differing:
        apart = [part for part in _parts_with(name) if part not in above]
        parts.add(apart[0] if apart else name)
    names = sorted(parts)[:8]
    return names[0] if len(names) == 1 else names


def _check_names(path: str, selection: Selection, names: Collection[str]) -> None:
    # A part that is in neither is a mistake in the name.
    for part in (*(selection.only or ()), *selection.skip):
        if any(is_inside(name, [part]) for name in names):
            continue
        depth = part.count("/") + 1
        there = sorted({"/".join(name.split("/")[:depth]) for name in names})
        raise CheckpointMismatchError(
            f"`path` is {path!r}, and {part!r} is neither in it nor in the program. "
            f"Existing paths:\n{list_lines(there)}\n"
            "Use one of these. To give an object the path that it has in a checkpoint, "
            "use a dictionary: `Checkpoint(model={'backbone': encoder})`."
        )


def is_inside(path: str, parts: Iterable[str]) -> bool:
    """Returns whether a path is one of some parts, or is inside one."""
    return any(path == part or path.startswith(f"{part}/") for part in parts)


def _parts_with(path: str) -> list[str]:
    """Returns the parts around a path, the largest first, and the path itself."""
    return list(itertools.accumulate(path.split("/"), "{}/{}".format))
