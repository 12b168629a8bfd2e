"""The table of names: which tensors of a file are which arrays of a model.

One row holds a name in the file, a name in the model, and transforms. The same row is
used to load and to save. A name may have fields, such as `{layer}`, which stand for a
number.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from armillary._checks import check_instance
from armillary.pretrained._transforms import Transform, tied

_FIELD = re.compile(r"\{(\w*)\}")
_EXAMPLE = '("layers.{layer}.up.weight", "blocks/up/kernel", pretrained.transpose)'


class Pattern:
    """A name in which fields such as `{layer}` stand for numbers."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.fields = tuple(dict.fromkeys(_FIELD.findall(text)))
        parts = _FIELD.split(text)
        seen: set[str] = set()
        expression = ""
        for place, part in enumerate(parts):
            is_between_fields = place % 2 == 0
            if is_between_fields:
                expression += re.escape(part).replace(r"\*", ".*")
            elif part in seen:
                expression += f"(?P={part})"
            else:
                expression += f"(?P<{part}>0|[1-9][0-9]*)"
                seen.add(part)
        self._expression = re.compile(expression)

    def match(self, name: str) -> dict[str, int] | None:
        """Returns the numbers in a name, or `None` if it is a different name."""
        found = self._expression.fullmatch(name)
        if found is None:
            return None
        return {field: int(found[field]) for field in self.fields}

    def fill(self, numbers: dict[str, int]) -> str:
        """Returns the name with these numbers."""
        return _FIELD.sub(lambda field: str(numbers[field[1]]), self.text)


class Row(NamedTuple):
    """One row of the table; a side without patterns is not there."""

    files: tuple[Pattern, ...]
    models: tuple[Pattern, ...]
    transforms: tuple[Transform, ...]

    @property
    def is_tied(self) -> bool:
        return tied in self.transforms

    @property
    def shared(self) -> tuple[str, ...]:
        """The fields of both sides: each of their values is an array of the model."""
        return self.models[0].fields if self.models else ()

    @property
    def stacked(self) -> tuple[str, ...]:
        """The fields of the file alone, which are the first axes in the model."""
        fields = self.files[0].fields
        return tuple(field for field in fields if field not in self.shared)


class Names:
    """A table of names: rows of a name in the file, a name in the model, transforms.

    The names in the model are paths, such as `blocks/up/kernel`, as in a checkpoint and
    its errors. `{layer}` and similar fields stand for a number. A field on both sides
    means one array for each number. A field of the file alone means that the tensors
    are stacked along a first axis, as `nnx.vmap` makes the blocks of a scan::

        names = pretrained.Names([
            ("model.embed_tokens.weight", "embed/embedding"),
            ("model.layers.{layer}.mlp.up_proj.weight", "blocks/up/kernel",
             pretrained.transpose),
            ("lm_head.weight", "embed/embedding", pretrained.tied),
            ("*.rotary_emb.inv_freq", None),
            (None, "head/kernel"),
        ])

    Several fields of the file alone are several axes, in the order of the name. A side
    is a tuple of names if a transform splits or joins tensors. `None` stands for the
    side that does not have an array. In the name next to it, `*` stands for any text.

    Args:
        rows: The rows, as tuples.

    Raises:
        TypeError: If a row is not a tuple of names and transforms.
        ValueError: If the names of a row do not fit each other.
    """

    def __init__(self, rows: Sequence[tuple[Any, ...]]) -> None:
        check_instance("rows", rows, list | tuple, f"Use `Names([{_EXAMPLE}])`.")
        self.rows = tuple(map(_make_row, rows))

    def has_path(self, path: str) -> bool:
        """Returns whether a row has a name in the file for a path in the model."""
        for row in self.rows:
            is_named = any(pattern.match(path) is not None for pattern in row.models)
            if row.files and is_named:
                return True
        return False


def _make_row(row: Any) -> Row:
    """Returns a row; raises if it makes no sense."""
    if not isinstance(row, tuple) or len(row) < 2:
        raise TypeError(
            f"A row of `rows` is {row!r}, but it must be a tuple of a name in the "
            f"file, a name in the model, and transforms. Use `{_EXAMPLE}`."
        )
    file, model, *transforms = row
    for transform in transforms:
        if not isinstance(transform, Transform):
            raise TypeError(
                f"A row of `rows` is {row!r}, in which {transform!r} must be a "
                "transform. Use `pretrained.transpose`, or "
                '`pretrained.rearrange("out in -> in out")`.'
            )
    files = _make_side(row, file)
    models = _make_side(row, model)
    made = Row(files, models, tuple(transforms))
    problem = _find_problem(made)
    if problem:
        raise ValueError(f"A row of `rows` is {row!r}, but {problem}.")
    return made


def _make_side(row: tuple[Any, ...], side: Any) -> tuple[Pattern, ...]:
    names = side if isinstance(side, tuple) else (side,)
    if names == (None,):
        return ()
    are_names = [isinstance(name, str) and bool(name) for name in names]
    if not names or not all(are_names):
        raise TypeError(
            f"A row of `rows` is {row!r}, in which {side!r} must be a name, a tuple of "
            f"names, or `None`. Use `{_EXAMPLE}`."
        )
    for name in names:
        if not _has_good_fields(name):
            raise ValueError(
                f"A row of `rows` has the name {name!r}, in which a field must be a "
                'word in braces. Use `"layers.{layer}.weight"`.'
            )
    return tuple(map(Pattern, names))


def _has_good_fields(name: str) -> bool:
    """Returns whether each brace of a name belongs to a field, which is a word."""
    others = _FIELD.sub("", name)
    if "{" in others or "}" in others:
        return False
    return all(field.isidentifier() for field in _FIELD.findall(name))


def _find_problem(row: Row) -> str:
    """Returns the fault of a row, and its fix; empty if there is none."""
    sides = [side for side in (row.files, row.models) if side]
    if not sides:
        return "one of its sides must be a name. Remove the row"
    for side in sides:
        fields = {frozenset(pattern.fields) for pattern in side}
        if len(fields) > 1:
            return "all names of one side must have the same fields. Add them"
    if len(sides) == 1:
        if row.transforms:
            return "next to `None`, there is nothing to transform. Remove that"
        return ""
    texts = [pattern.text for pattern in (*row.files, *row.models)]
    if any("*" in text for text in texts):
        return "`*` may stand only next to `None`. Name one array in each row"
    unknown = set(row.models[0].fields) - set(row.files[0].fields)
    if unknown:
        return (
            f"the file's name must have the field {{{min(unknown)}}} of the model's. "
            "To stack tensors, leave a field out of the model's name"
        )
    return _find_wrong_count(row)


def _find_wrong_count(row: Row) -> str:
    number = len(row.files)
    try:
        for transform in row.transforms:
            number = transform.count(number)
    except ValueError as error:
        return f"{error}. Name as many tensors"
    named = len(row.models)
    if number == named:
        return ""
    way = "split" if number < named else "join"
    return (
        f"its transforms make {number} arrays, and {named} are named. Use "
        f"`pretrained.{way}`"
    )
