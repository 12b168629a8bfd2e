"""Links: the tensors of a file and the arrays of a model that belong together.

A row of the table stands for one link, or for one link for each number of a field that
is in both names, such as each layer in a list of layers.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from armillary.pretrained._names import Row

Numbers = tuple[int, ...]


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
    num_axes = len(row.stacked)
    counts: dict[Numbers, list[int]] = {}
    for pattern, path in itertools.product(row.models, paths):
        numbers = pattern.match(path)
        if numbers is not None:
            counts.setdefault(_shared(row, numbers), [0] * num_axes)

    for pattern, name in itertools.product(row.files, files):
        numbers = pattern.match(name)
        if numbers is None:
            continue
        lengths = counts.setdefault(_shared(row, numbers), [0] * num_axes)
        for place, field in enumerate(row.stacked):
            lengths[place] = max(lengths[place], numbers[field] + 1)

    links: list[Link] = []
    for key, lengths in sorted(counts.items()):
        # A number may be so large that its tensors cannot be listed.
        is_possible = math.prod(lengths) <= len(files)
        links.append(_make_link(row, key, lengths if is_possible else [0] * num_axes))
    return links


def link_model(row: Row, shapes: Mapping[str, tuple[int, ...]]) -> list[Link]:
    """Returns the links of a row, for arrays of a model and their shapes.

    The model decides how many tensors are stacked.
    """
    links: list[Link] = []
    for path, shape in shapes.items():
        numbers = row.models[0].match(path)
        if numbers is not None:
            lengths = shape[: len(row.stacked)]
            links.append(_make_link(row, _shared(row, numbers), lengths))
    return links


def _shared(row: Row, numbers: Mapping[str, int]) -> Numbers:
    return tuple(numbers[field] for field in row.shared)


def _make_link(row: Row, key: Numbers, counts: Sequence[int]) -> Link:
    numbers = dict(zip(row.shared, key, strict=True))
    files: dict[Numbers, tuple[str, ...]] = {}
    has_axes = len(counts) == len(row.stacked)
    for index in itertools.product(*map(range, counts)) if has_axes else ():
        place = numbers | dict(zip(row.stacked, index, strict=True))
        files[index] = tuple(pattern.fill(place) for pattern in row.files)
    paths = tuple(pattern.fill(numbers) for pattern in row.models)
    return Link(row, paths, files, tuple(counts))
