"""The argument `kinds` of a pure step: its names, and its text in messages."""

import re
from collections.abc import Iterable

from armillary.distribute.replica._policy import VariableAggregation

_MOST_PATTERNS = 4

KINDS = {each.name.lower(): each for each in VariableAggregation}
"""The kinds by name, such as `"mean"`."""


def as_kinds(paths: Iterable[str], kind: str = "none") -> str:
    """Returns the argument that gives a kind to the leaves with these paths."""
    names: dict[str, list[str]] = {}
    for path in paths:
        parent, _, name = path.rpartition("/")
        names.setdefault(parent, []).append(re.escape(name))
    entries = [
        f'r"{_pattern_of(parent, each)}": "{kind}"' for parent, each in names.items()
    ]
    if len(entries) > _MOST_PATTERNS:
        entries = [*entries[:_MOST_PATTERNS], "..."]
    return f"kinds={{{', '.join(entries)}}}"


def _pattern_of(parent: str, names: list[str]) -> str:
    last = names[0] if len(names) == 1 else f"({'|'.join(names)})"
    return f"{re.escape(parent)}/{last}$" if parent else f"{last}$"
