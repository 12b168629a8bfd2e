"""Which values of a checkpoint go where in a program, and which may be left out.

A part is named by a path, and is everything at that path or below it: `model/backbone`
has `model/backbone/kernel`; `*` stands for any one name between slashes. All names are
paths of the program; `rename` says which of them a checkpoint calls otherwise. What is
selected must be the same in both, except in parts that may differ: each of those is
restored whole, or stays whole as the program made it.
"""

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from armillary._checks import list_lines
from armillary._logging import logger
from armillary.checkpoint._leaf import LeafSpec
from armillary.checkpoint._messages import (
    describe_mismatch,
    describe_nothing,
    find_differences,
    parts_with,
)
from armillary.errors import CheckpointMismatchError

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
