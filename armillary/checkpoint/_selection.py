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
from armillary.checkpoint._content import WITH_DIGEST
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
        data_positions: Paths of trainers. For such a path, `restored`, `kept` and
            `unused` say what happened to the position in the data of the trainer. The
            arrays of the trainer have longer paths.
    """

    path: str
    restored: tuple[str, ...]
    kept: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    data_positions: tuple[str, ...] = ()

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
                shown = [show_path(path, self.data_positions) for path in entries]
                lines.append(list_lines(shown))
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
    passing: tuple[str, ...] = ()
    """Parts that may differ without a word of the user, such as a loop's metrics."""

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
    differences = find_differences(old, own)
    matching = old.keys() & own.keys() - differences.keys()
    allowed = (*selection.may_differ, *selection.passing)
    refused = {n: line for n, line in differences.items() if not is_inside(n, allowed)}
    if refused:
        fix = _find_renamed(saved, program) or _find_moved(selection, saved, own)
        if fix is None and not matching:
            fix = "there is nothing to restore, because no leaf is the same in both"
        if fix is None and selection.only is not None and own.keys() == matching:
            fix = _name_only(matching, {*saved, *program} - matching)
        if fix is None:
            fix = _name_may_differ(refused, matching, selection.may_differ)
        raise CheckpointMismatchError(
            f"`path` is {path!r}, and {_counted_differences(refused)} between it and "
            "the program, but they must be the same:\n"
            f"{list_lines(refused.values())}\n"
            f"{_explain_digests(refused, saved)}"
            "Build the objects in the same way as at the save. If they changed on "
            f"purpose, {fix}. For a new run, use a new directory. Nothing was restored."
        )

    left = _find_left(allowed, differences)
    taken = sorted(name for name in matching if not is_inside(name, left))
    lines = tuple(differences.values())
    if not taken:
        fix = "add a matching path to `only`, or remove paths from `skip`"
        if matching:
            states = matching.intersection(allowed)  # such as the position in the data
            fix = _name_may_differ(differences, matching, states)
        raise CheckpointMismatchError(
            f"`path` is {path!r}, and nothing of it would be restored. To restore a "
            f"part, {fix}. Differences:\n{list_lines(lines) or '  none'}"
        )
    return taken, lines


def _explain_digests(refused: Iterable[str], saved: Specs) -> str:
    """Returns the advice for arrays that a checkpoint leaves out."""
    if not any(WITH_DIGEST in saved.get(name, "") for name in refused):
        return ""
    return (
        "An array with a digest was left out at the save (`leave_out`), so the "
        "checkpoint has no values of it. Load the values that the saved run began "
        "with, before you make the `Checkpoint`. "
    )


def _counted_differences(differences: Collection[str]) -> str:
    is_one = len(differences) == 1
    return "1 leaf differs" if is_one else f"{len(differences)} leaves differ"


def _find_left(allowed: Collection[str], differences: Iterable[str]) -> set[str]:
    """Returns the parts that stay as they are, because they hold a difference.

    If an allowed part is inside another one, a difference counts for the inner part.
    A state such as the position of a trainer's data has the path of the trainer. If
    only this state differs, the arrays below it are restored.
    """
    left: set[str] = set()
    for name in differences:
        around = [part for part in allowed if is_inside(name, [part])]
        innermost = max(around, key=len, default=name)
        if innermost != name:
            left.add(innermost)
    return left


def find_differences(
    saved: Specs,
    program: Specs,
    stored: str = "the checkpoint",
    own: str = "the program",
) -> dict[str, str]:
    """Returns a line for each path at which two sides differ, by their titles."""
    lines: dict[str, str] = {}
    for path in sorted(saved.keys() | program.keys()):
        old = saved.get(path)
        new = program.get(path)
        if new is None:
            lines[path] = f"- {path}: {old}  only in {stored}"
        elif old is None:
            lines[path] = f"+ {path}: {new}  only in {own}"
        elif old != new:
            lines[path] = f"~ {path}: {old} in {stored}, {new} in {own}"
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


def _find_moved(selection: Selection, saved: Specs, own: Specs) -> str | None:
    """Returns the advice for an object that is saved inside another one.

    For example, the model of a run that was saved by `Checkpoint(trainer=trainer)` has
    the path `trainer/model`.
    """
    if selection.only is None:
        return None
    saved_names = {path.partition("/")[0] for path in saved}
    for name in sorted({path.partition("/")[0] for path in own} - saved_names):
        leaves = {path: spec for path, spec in own.items() if is_inside(path, [name])}
        places = {part for path in saved for part in _parts_with(path)}
        for place in sorted(places, key=lambda part: (part.count("/"), part)):
            outer, _, last = place.rpartition("/")
            if last != name:
                continue
            moved = {f"{outer}/{path}": spec for path, spec in leaves.items()}
            plain = {
                path: spec.partition(WITH_DIGEST)[0] for path, spec in saved.items()
            }
            if moved.items() <= plain.items():
                return _show_read(name, place)
    return None


def _show_read(name: str, place: str) -> str:
    """Returns the advice to read the object `name` from a longer path."""
    root, *keys = place.split("/")
    value = name
    for key in reversed(keys):
        value = f"{{{key!r}: {value}}}"
    return (
        f"read `{name}` from its path in the checkpoint: "
        f"`Checkpoint({root}={value}).read(path, only={place!r})`"
    )


def _name_only(matching: Collection[str], others: Collection[str]) -> str | None:
    """Returns the argument that restores only the matching leaves, if there is one."""
    # The path of a state cannot stand for the state alone if arrays are below it.
    if not {part for name in others for part in _parts_with(name)}.isdisjoint(matching):
        return None
    parts = show_parts(_find_parts(matching, others))
    return f"name the parts to restore: `only={parts}`"


def _name_may_differ(
    differing: Collection[str], matching: Collection[str], given: Collection[str]
) -> str:
    """Returns the argument that allows differences, and the `given` parts."""
    parts = show_parts(_find_parts(differing, matching) | set(given))
    return f"name the parts that may differ: `may_differ={parts}`"


def _find_parts(paths: Iterable[str], others: Collection[str]) -> set[str]:
    """Returns the largest parts that hold some paths, and no other ones."""
    around_others = {part for name in others for part in _parts_with(name)}
    parts: set[str] = set()
    for name in paths:
        apart = [part for part in _parts_with(name) if part not in around_others]
        parts.add(apart[0] if apart else name)
    return parts


def show_path(path: str, data_positions: Collection[str]) -> str:
    """Returns a path; the path of a trainer says that its arrays are not meant."""
    return f"{path} (the position in its data)" if path in data_positions else path


def show_parts(parts: Collection[str]) -> str:
    """Returns parts as the value of an argument: a path, or a list of paths."""
    names = sorted(parts)
    return repr(names[0] if len(names) == 1 else names)


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
