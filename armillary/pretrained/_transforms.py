"""Transforms: how the tensors of a file become an array of a model, and back.

`forward` goes from the file to the model, and `backward` from the model to the file.
Both take views and return views, so nothing is read until a part is asked for.
"""

import abc
import itertools
from collections.abc import Sequence
from typing import Any

from armillary._checks import (
    check_instance,
    check_not_negative_int,
    check_positive_int,
)
from armillary.pretrained._rearrange import Rearranged, parse_axes
from armillary.pretrained._views import Joined, Part, View


class Transform(abc.ABC):
    """A change of the layout of tensors that can be undone."""

    @abc.abstractmethod
    def forward(self, views: Sequence[View]) -> list[View]:
        """Returns views as the model has them, from views as the file has them."""

    @abc.abstractmethod
    def backward(self, views: Sequence[View]) -> list[View]:
        """Returns views as the file has them, from views as the model has them."""

    def count(self, number: int) -> int:
        """Returns how many tensors `forward` makes from a number of tensors."""
        return number


class _Rearrange(Transform):
    def __init__(self, pattern: str, sizes: dict[str, int]) -> None:
        self._text = f"rearrange({pattern!r})"
        left, right = pattern.split("->")
        self._before = parse_axes(left)
        self._after = parse_axes(right)
        self._sizes = sizes

    def __repr__(self) -> str:
        return self._text

    def forward(self, views: Sequence[View]) -> list[View]:
        return [Rearranged(v, self._before, self._after, self._sizes) for v in views]

    def backward(self, views: Sequence[View]) -> list[View]:
        return [Rearranged(v, self._after, self._before, self._sizes) for v in views]


class _Split(Transform):
    def __init__(self, sizes: int | tuple[int, ...], axis: int) -> None:
        self._sizes = sizes
        self._axis = axis

    def __repr__(self) -> str:
        return f"split({self._sizes}, axis={self._axis})"

    def forward(self, views: Sequence[View]) -> list[View]:
        (view,) = views
        parts: list[View] = []
        offset = 0
        for size in self._find_sizes(view):
            parts.append(Part(view, self._axis, offset, size))
            offset += size
        return parts

    def backward(self, views: Sequence[View]) -> list[View]:
        joined = Joined(views, self._axis)
        for view, size in zip(views, self._find_sizes(joined), strict=True):
            if view.shape[self._axis] != size:
                raise ValueError(f"{view} has not {size} along axis {self._axis}")
        return [joined]

    def count(self, number: int) -> int:
        if number != 1:
            raise ValueError(f"`{self}` takes one tensor, but gets {number}")
        return self.num_parts

    @property
    def num_parts(self) -> int:
        if isinstance(self._sizes, int):
            return self._sizes
        return len(self._sizes)

    def _find_sizes(self, view: View) -> Sequence[int]:
        if self._axis >= len(view.shape):
            raise ValueError(f"{view} has no axis {self._axis}")
        length = view.shape[self._axis]
        if isinstance(self._sizes, int):
            size, remainder = divmod(length, self._sizes)
            if remainder:
                raise ValueError(f"{length} cannot be divided into {self._sizes} parts")
            return [size] * self._sizes
        if sum(self._sizes) != length:
            raise ValueError(f"the axis of size {length} is not {self._sizes}")
        return self._sizes


class _Join(Transform):
    def __init__(self, split: _Split) -> None:
        self._split = split

    def __repr__(self) -> str:
        return repr(self._split).replace("split", "join", 1)

    def forward(self, views: Sequence[View]) -> list[View]:
        return self._split.backward(views)

    def backward(self, views: Sequence[View]) -> list[View]:
        return self._split.forward(views)

    def count(self, number: int) -> int:
        parts = self._split.num_parts
        if number != parts:
            raise ValueError(f"`{self}` takes {parts} tensors, but gets {number}")
        return 1


class _Tied(Transform):
    """Marks a tensor that is equal to another one, such as an output layer's.

    The row names an array that an earlier row names, too. A file may have the tensor or
    not. If it does, it must be equal to the other one. It is not written.
    """

    def __repr__(self) -> str:
        return "tied"

    def forward(self, views: Sequence[View]) -> list[View]:
        return list(views)

    def backward(self, views: Sequence[View]) -> list[View]:
        return list(views)


def rearrange(pattern: str, **sizes: int) -> Transform:
    """Divides, moves and merges axes, from the file to the model.

    The notation is the one of einops. Names in parentheses are parts of one axis, and
    the last name changes fastest::

        rearrange("out in height width -> height width in out")
        rearrange("(heads size) embed -> embed heads size", size=64)

    The reverse direction needs no second pattern. In each axis with parts, all sizes
    except one must be known.

    Args:
        pattern: The axes of the tensor in the file, `->`, and the axes in the model.
        **sizes: Sizes of parts, by name.

    Returns:
        A transform for a row of `Names`.

    Raises:
        TypeError: If `pattern` is not a string.
        ValueError: If the two sides do not have the same names, each once.
    """
    fix = 'Use `rearrange("out in -> in out")`.'
    check_instance("pattern", pattern, str, fix)
    for name, size in sizes.items():
        check_positive_int(name, size)
    try:
        left, right = map(parse_axes, pattern.split("->"))
    except ValueError as error:
        raise ValueError(
            f"`pattern` is {pattern!r}, but it must be two lists of names with `->` "
            f"between them: {error}. {fix}"
        ) from error
    before, after = (sorted(itertools.chain(*side)) for side in (left, right))
    unknown = sizes.keys() - set(before)
    if before != after or unknown:
        raise ValueError(
            f"`pattern` is {pattern!r}, but it must have the same names on both sides, "
            f"and each size must have one of these names. {fix}"
        )
    for axis in (*left, *right):
        missing = [name for name in axis if name not in sizes]
        if len(missing) > 1:
            raise ValueError(
                f"`pattern` is {pattern!r}, in which one axis has the parts "
                f"{' and '.join(missing)} of unknown sizes, but only one may be "
                f"unknown. Use `rearrange({pattern!r}, {missing[-1]}=64)`."
            )
    return _Rearrange(pattern, sizes)


def split(sizes: int | Sequence[int], *, axis: int) -> Transform:
    """Splits a tensor of the file into several arrays of the model.

    In a row of `Names`, the model's side is a tuple with a pattern for each part::

        ("h.{layer}.attn.c_attn.weight",
         ("blocks/query/kernel", "blocks/key/kernel", "blocks/value/kernel"),
         pretrained.split(3, axis=1))

    Args:
        sizes: The number of equal parts, or the size of each part.
        axis: The axis to split, from 0.

    Returns:
        A transform for a row of `Names`.

    Raises:
        TypeError: If `sizes` is neither a number nor a sequence of numbers.
        ValueError: If a size is not positive, or the axis is negative.
    """
    return _make_split(sizes, axis)


def join(sizes: int | Sequence[int], *, axis: int) -> Transform:
    """Joins several tensors of the file into one array of the model.

    It is the reverse of `split`: the file's side is a tuple of patterns. The sizes are
    needed to save the array.

    Args:
        sizes: The number of equal tensors, or the size of each tensor.
        axis: The axis along which they are joined, from 0.

    Returns:
        A transform for a row of `Names`.

    Raises:
        TypeError: If `sizes` is neither a number nor a sequence of numbers.
        ValueError: If a size is not positive, or the axis is negative.
    """
    return _Join(_make_split(sizes, axis))


def _make_split(sizes: Any, axis: Any) -> _Split:
    axis = check_not_negative_int("axis", axis)
    if not isinstance(sizes, list | tuple):
        return _Split(check_positive_int("sizes", sizes), axis)
    checked = [check_positive_int("sizes", each) for each in sizes]
    return _Split(tuple(checked), axis)


transpose = rearrange("first second -> second first")
transpose.__doc__ = (
    "Swaps the two axes of a matrix, as between PyTorch's `weight` and a `kernel`."
)
tied = _Tied()
