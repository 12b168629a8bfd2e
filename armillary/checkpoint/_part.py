"""A part of a checkpoint: which of its paths go where in a program.

A part is named by a path, and is everything at that path or below it: `model/backbone`
has `model/backbone/kernel`. In the program it may have another path. Inside a part,
checkpoint and program must hold the same leaves, as everywhere; outside, anything.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from armillary._checks import list_lines
from armillary.checkpoint._leaf import LeafSpec
from armillary.checkpoint._messages import find_differences
from armillary.errors import CheckpointMismatchError

Parts = str | Iterable[str] | Mapping[str, str]
"""One path, several, or the paths in the program by those in the checkpoint."""


class RestoredPart(NamedTuple):
    """What restoring a part of a checkpoint did; `print` shows it in full.

    Attributes:
        path: The checkpoint.
        restored: Paths of the program that have the values of the checkpoint now.
        kept: Paths of the program that are as they were.
        unused: Paths of the checkpoint that went nowhere.
    """

    path: str
    restored: tuple[str, ...]
    kept: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        sections = (
            ("restored", self.restored),
            ("of the program, left as they were", self.kept),
            ("of the checkpoint, not used", self.unused),
        )
        lines = [f"A part of {self.path}:"]
        for title, paths in sections:
            lines.append(f"{len(paths)} {title}{':' if paths else '.'}")
            if paths:
                lines.append(list_lines(paths))
        return "\n".join(lines)


class Sources(NamedTuple):
    """Where a program's values come from.

    Attributes:
        leaves: The path in the checkpoint of each leaf, by its path in the program.
        states: The same for the states of objects.
    """

    leaves: dict[str, str]
    states: dict[str, str]


def as_parts(parts: Any) -> dict[str, str]:
    """Returns the path in the program of each part, by its path in the checkpoint.

    Raises:
        TypeError: If `parts` is not of strings.
        ValueError: If it is empty, or one part lies inside another.
    """
    if isinstance(parts, str):
        parts = [parts]
    is_iterable = isinstance(parts, Iterable)
    pairs = dict(parts) if isinstance(parts, Mapping) else {}
    if is_iterable and not pairs:
        pairs = {part: part for part in parts}
    if not is_iterable or not all(
        isinstance(name, str) for pair in pairs.items() for name in pair
    ):
        raise TypeError(
            f"`parts` is {parts!r} of type {type(parts).__name__}, but it must be a "
            "path, several, or a dictionary of them. Use "
            '`parts="model/backbone"`, or `parts={"model/encoder": "model/backbone"}` '
            "for a part with another path in the program."
        )
    pairs = {old.strip("/"): new.strip("/") for old, new in pairs.items()}
    names = [name for pair in pairs.items() for name in pair]
    if not names or not all(names):
        raise ValueError(
            f"`parts` is {parts!r}, but it must name what to restore. Use "
            '`parts="model/backbone"`, or `manager.restore(path)` for everything.'
        )
    for column in (list(pairs), list(pairs.values())):
        for index, name in enumerate(column):
            for other in column[:index] + column[index + 1 :]:
                if _below(name, other) is not None:
                    raise ValueError(
                        f"`parts` is {parts!r}, in which {name!r} is a part of "
                        f"{other!r}, but parts must lie apart. Leave one of them out."
                    )
    return pairs


def match_parts(
    path: str,
    parts: Mapping[str, str],
    *,
    saved: Mapping[str, LeafSpec],
    program: Mapping[str, LeafSpec],
    saved_states: Collection[str],
    program_states: Collection[str],
) -> Sources:
    """Returns where the values of some parts come from.

    Args:
        path: The checkpoint, for the message.
        parts: The path in the program of each part, by its path in the checkpoint.
        saved: The leaves of the checkpoint.
        program: The leaves of the program.
        saved_states: Names of the objects whose `get_state` was saved.
        program_states: Names of the objects of the program that have `set_state`.

    Raises:
        CheckpointMismatchError: If a part is missing, or is not the same in both.
    """
    for part in parts:
        _check_is_there(path, "the checkpoint", part, [*saved, *saved_states])
    for part in parts.values():
        _check_is_there(path, "the program", part, [*program, *program_states])
    sources = Sources(_rename(saved, parts), _rename(saved_states, parts))
    inside = {part: part for part in parts.values()}
    lines = find_differences(
        {new: saved[old] for new, old in sources.leaves.items()},
        {name: program[name] for name in _rename(program, inside)},
        sources.states,
        _rename(program_states, inside),
    )
    if lines:
        shown = ", ".join(
            repr(old) if old == new else f"{old!r} (here {new!r})"
            for old, new in parts.items()
        )
        raise CheckpointMismatchError(
            f"`path` is {path!r}, and {len(lines)} leaves of its part {shown} differ "
            f"from the program, which must hold the same ones there:\n"
            f"{list_lines(lines)}\n"
            "Name smaller parts that are the same in both, or build the objects as "
            "they were when this was saved. Nothing was restored."
        )
    return sources


def _rename(names: Iterable[str], parts: Mapping[str, str]) -> dict[str, str]:
    """Returns the names inside parts, by what they are called in the program."""
    found: dict[str, str] = {}
    for name in names:
        for old, new in parts.items():
            rest = _below(name, old)
            if rest is not None:
                found[new + rest] = name
    return found


def _below(name: str, part: str) -> str | None:
    """Returns what follows `part` in a path, or `None` if it lies elsewhere."""
    if name == part:
        return ""
    return name[len(part) :] if name.startswith(f"{part}/") else None


def _check_is_there(path: str, where: str, part: str, names: list[str]) -> None:
    """Raises if nothing has a part.

    Raises:
        CheckpointMismatchError: If no name lies inside it.
    """
    if any(_below(name, part) is not None for name in names):
        return
    # The names beside it: where the paths begin to differ.
    above = ""
    for name in part.split("/"):
        deeper = f"{above}/{name}" if above else name
        if not any(_below(each, deeper) is not None for each in names):
            break
        above = deeper
    rests = [name if not above else _below(name, above) for name in names]
    beside = {rest.lstrip("/").split("/")[0] for rest in rests if rest is not None}
    shown = sorted(f"{above}/{name}" if above else name for name in beside if name)
    raise CheckpointMismatchError(
        f"`path` is {path!r}, and `parts` names {part!r}, which {where} does not have. "
        f"It has:\n{list_lines(shown or [above])}\n"
        "Use one of these, or a path below it. Nothing was restored."
    )
