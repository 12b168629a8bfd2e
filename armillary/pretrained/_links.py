"""Links: the tensors of a file and the arrays of a model that belong together.

A row of the table stands for one link, or for one link for each number of a field that
is in both names, such as each layer in a list of layers.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from armillary.pretrained._names import Pattern, Row

Numbers = tuple[int, ...]
"""The numbers in a name, in the order of the row's fields."""


class Link(NamedTuple):
    """The arrays of a model that one row, for one value of its fields, stands for.

    Attributes:
        row: The row.
        paths: The names in the model: one, or the parts of a split tensor.
        files: The names in the file for each index along the stacked axes: one, or the
            tensors that are joined.
        counts: The lengths of the stacked axes.
    """

    row: Row
    paths: tuple[str, ...]
    files: dict[Numbers, tuple[str, ...]]
    counts: Numbers


def link_files(row: Row, files: Collection[str], paths: Collection[str]) -> list[Link]:
    """Returns the links of a row, for tensors and arrays that exist on either side.

    The file decides how many tensors are stacked.
    """
    empty = [0] * len(row.stacked)
    # By the shared numbers, the lengths of the stacked axes.
    counts: dict[Numbers, list[int]] = {}
    # An array without any tensor has a link, too, so that it is reported.
    for numbers in _match_all(row.models, paths):
        key = _shared(row, numbers)
        counts[key] = empty.copy()

    for numbers in _match_all(row.files, files):
        key = _shared(row, numbers)
        lengths = counts.setdefault(key, empty.copy())
        for axis, field in enumerate(row.stacked):
            lengths[axis] = max(lengths[axis], numbers[field] + 1)

    links: list[Link] = []
    for key, lengths in sorted(counts.items()):
        # A number may be so large that its tensors cannot be listed.
        has_gaps = math.prod(lengths) > len(files)
        links.append(_make_link(row, key, empty if has_gaps else lengths))
    return links


def link_model(row: Row, shapes: Mapping[str, tuple[int, ...]]) -> list[Link]:
    """Returns the links of a row, for arrays of a model and their shapes.

    The model decides how many tensors are stacked.
    """
    # If a row splits a tensor, the first part stands for all of them.
    first, *_ = row.models
    links: list[Link] = []
    for path, shape in shapes.items():
        numbers = first.match(path)
        if numbers is not None:
            key = _shared(row, numbers)
            lengths = shape[: len(row.stacked)]
            links.append(_make_link(row, key, lengths))
    return links


def _match_all(
    patterns: Sequence[Pattern], names: Collection[str]
) -> Iterator[dict[str, int]]:
    """Yields the numbers in each name that fits one of the patterns."""
    for pattern in patterns:
        for name in names:
            numbers = pattern.match(name)
            if numbers is not None:
                yield numbers


def _shared(row: Row, numbers: Mapping[str, int]) -> Numbers:
    return tuple(numbers[field] for field in row.shared)


def _make_link(row: Row, key: Numbers, counts: Sequence[int]) -> Link:
    """Returns the link of one value of the shared fields, and its stack."""
    numbers = dict(zip(row.shared, key, strict=True))
    paths = tuple(pattern.fill(numbers) for pattern in row.models)

    files: dict[Numbers, tuple[str, ...]] = {}
    # An array of a model may have fewer axes than the row stacks.
    has_all_axes = len(counts) == len(row.stacked)
    if has_all_axes:
        ranges = [range(count) for count in counts]
        for index in itertools.product(*ranges):
            own = dict(zip(row.stacked, index, strict=True))
            all_numbers = numbers | own
            files[index] = tuple(pattern.fill(all_numbers) for pattern in row.files)
    return Link(row, paths, files, tuple(counts))
