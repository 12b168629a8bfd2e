"""Rearranges the axes of a view: `"(heads size) embed -> embed heads size"`.

Names in parentheses are parts of one axis, and the last part changes fastest. The
notation is the one of einops. An axis that is divided or merged needs the sizes of its
parts, of which one may be unknown.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from armillary.pretrained._views import Box, View, lengths_of

Axes = tuple[tuple[str, ...], ...]
"""For each axis, the names of its parts."""

_AXIS = re.compile(r"\s*(?:\(([\w\s]*)\)|(\w+))\s*")


def parse_axes(text: str) -> Axes:
    """Returns the names in one side of a pattern.

    Raises:
        ValueError: If the text is no list of names, or has a name twice.
    """
    axes: list[tuple[str, ...]] = []
    place = 0
    while place < len(text):
        match = _AXIS.match(text, place)
        if match is None:
            raise ValueError(f"{text[place:]!r} is not a list of names")
        group, name = match.groups()
        axes.append((name,) if group is None else tuple(group.split()))
        place = match.end()

    names = list(itertools.chain.from_iterable(axes))
    has_number = any(name[0].isdigit() for name in names)
    has_repeated_name = len(names) != len(set(names))
    if has_number or has_repeated_name:
        raise ValueError(f"{text!r} has a name twice, or a number")
    return tuple(axes)


class Rearranged(View):
    """A view whose axes are divided, moved and merged."""

    def __init__(
        self, view: View, before: Axes, after: Axes, sizes: Mapping[str, int]
    ) -> None:
        self._view = view
        self._before = before
        self._after = after
        self._sizes = _find_sizes(view.shape, before, sizes)
        self.shape = tuple(math.prod(self._sizes_of(axis)) for axis in after)
        self.dtype = view.dtype

    def read(self, box: Box) -> np.ndarray:
        lengths = lengths_of(box)
        if 0 in lengths:
            return np.empty(lengths, self.dtype)

        # The range of each part, such as 2 of 8 heads and all of their size.
        ranges: dict[str, range] = {}
        for axis, wanted in zip(self._after, box, strict=True):
            covering = _cover(wanted, self._sizes_of(axis))
            ranges |= zip(axis, covering, strict=True)

        data = self._read_ranges(ranges)
        data = self._move_axes(data, ranges)
        return self._cut_out(data, ranges, box)

    def _move_axes(self, data: np.ndarray, ranges: Mapping[str, range]) -> np.ndarray:
        """Returns an array with one axis for each part, in the order of the result."""
        names = list(itertools.chain.from_iterable(self._before))
        divided = data.reshape([len(ranges[name]) for name in names])

        new_names = itertools.chain.from_iterable(self._after)
        order = [names.index(name) for name in new_names]
        return divided.transpose(order)

    def _cut_out(
        self, data: np.ndarray, ranges: Mapping[str, range], box: Box
    ) -> np.ndarray:
        """Merges the axes of parts, and returns a box of the result.

        Ranges of parts may cover more of a merged axis than the box.
        """
        covered: list[int] = []
        inner: list[slice] = []
        for axis, wanted in zip(self._after, box, strict=True):
            own = [ranges[name] for name in axis]
            covered.append(math.prod(map(len, own)))
            starts = [each.start for each in own]
            first = _flat_index(starts, self._sizes_of(axis))
            inner.append(slice(wanted.start - first, wanted.stop - first))
        return data.reshape(covered)[tuple(inner)]

    def _read_ranges(self, ranges: Mapping[str, range]) -> np.ndarray:
        """Returns the elements of the inner view in a range of each part."""
        runs: list[list[slice]] = []
        for axis in self._before:
            own = [ranges[name] for name in axis]
            runs.append(_find_runs(own, self._sizes_of(axis)))
        is_one_box = all(len(each) == 1 for each in runs)
        if is_one_box:
            return self._view.read(tuple(each[0] for each in runs))

        # A box for each combination of runs, such as a part of each head.
        lengths = [sum(lengths_of(each)) for each in runs]
        data = np.empty(lengths, self.dtype)
        for combination in itertools.product(*map(_with_places, runs)):
            sources, places = zip(*combination, strict=True)
            data[places] = self._view.read(sources)
        return data

    def _sizes_of(self, axis: Sequence[str]) -> list[int]:
        return [self._sizes[name] for name in axis]


def _find_sizes(
    shape: tuple[int, ...], axes: Axes, given: Mapping[str, int]
) -> dict[str, int]:
    """Returns the size of each name; raises if the shape does not fit the names."""
    if len(shape) != len(axes):
        raise ValueError(f"{shape} has {len(shape)} axes instead of {len(axes)}")
    sizes: dict[str, int] = {}
    for size, axis in zip(shape, axes, strict=True):
        known = [given[name] for name in axis if name in given]
        is_complete = len(known) == len(axis)
        rest, remainder = divmod(size, math.prod(known))
        has_rest = is_complete and rest != 1
        if remainder or has_rest:
            raise ValueError(f"the axis of size {size} is no {' x '.join(axis)}")
        # At most one size of an axis is unknown, so the rest is that size.
        for name in axis:
            sizes[name] = given.get(name, rest)
    return sizes


def _cover(wanted: slice, sizes: Sequence[int]) -> list[range]:
    """Returns ranges of the parts that cover a range of a merged axis.

    For example, elements 5 to 7 of 3 heads of size 4 are in head 1, from place 1 to 3.
    Elements 3 to 5 are in two heads, of which all places are read.
    """
    ranges: list[range] = []
    start = wanted.start
    last = wanted.stop - 1
    # Whether each part up to here has one index, so that the next one may be narrow.
    is_one = True
    for place, size in enumerate(sizes):
        if not is_one:
            ranges.append(range(size))
            continue

        stride = math.prod(sizes[place + 1 :])
        first, start = divmod(start, stride)
        end, last = divmod(last, stride)
        ranges.append(range(first, end + 1))
        is_one = first == end
    return ranges


def _find_runs(ranges: Sequence[range], sizes: Sequence[int]) -> list[slice]:
    """Returns the ranges of a divided axis that hold a range of each part."""
    if not ranges:
        return [slice(0, 1)]
    # Parts that are complete do not interrupt a run, so it begins at the last one that
    # is not.
    inner = len(ranges) - 1
    while inner and len(ranges[inner]) == sizes[inner]:
        inner -= 1

    stride = math.prod(sizes[inner + 1 :])
    length = len(ranges[inner]) * stride

    runs: list[slice] = []
    for outer in itertools.product(*ranges[:inner]):
        index = [*outer, ranges[inner].start]
        start = _flat_index(index, sizes[: inner + 1]) * stride
        runs.append(slice(start, start + length))
    return runs


def _with_places(runs: Sequence[slice]) -> list[tuple[slice, slice]]:
    """Returns each range with its place, if the ranges lie one after another."""
    pairs: list[tuple[slice, slice]] = []
    offset = 0
    for run in runs:
        length = run.stop - run.start
        pairs.append((run, slice(offset, offset + length)))
        offset += length
    return pairs


def _flat_index(index: Sequence[int], sizes: Sequence[int]) -> int:
    """Returns the place of an index if the last axis changes fastest."""
    flat = 0
    for each, size in zip(index, sizes, strict=True):
        flat = flat * size + each
    return flat
