"""Views: arrays that read only the part that is asked for.

A view has the shape and the dtype of an array, and `read` returns a box of it: a start
and a stop for each axis. A view of a view asks the inner one only for the box that it
needs. So the part of a model's array on one device becomes parts of tensors in files.
"""

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from armillary.errors import CheckpointMismatchError

Shape = tuple[int, ...]
Box = tuple[slice, ...]
"""A slice without a step for each axis, whose start and stop are numbers."""


class View(abc.ABC):
    """An array of which parts can be read."""

    shape: Shape
    dtype: np.dtype

    @abc.abstractmethod
    def read(self, box: Box) -> np.ndarray:
        """Returns a part of the array."""

    def __getitem__(self, index: Sequence[slice]) -> np.ndarray:
        """Returns the part at an index of JAX, whose slices may have no limits."""
        box: list[slice] = []
        for each, size in zip(index, self.shape, strict=True):
            start, stop, _ = each.indices(size)
            box.append(slice(start, stop))
        return self.read(tuple(box))

    def read_whole(self) -> np.ndarray:
        return self.read(tuple(slice(0, size) for size in self.shape))

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class Joined(View):
    """Views one after another along an axis."""

    def __init__(self, views: Sequence[View], axis: int) -> None:
        first = _check_alike(views, axis)
        length = sum(view.shape[axis] for view in views)
        self._views = views
        self._axis = axis
        self.shape = _with_size(first.shape, axis, length)
        self.dtype = first.dtype

    def read(self, box: Box) -> np.ndarray:
        wanted = box[self._axis]
        parts: list[np.ndarray] = []
        offset = 0
        for view in self._views:
            # The range in the numbering of this view, which may not be in it at all.
            length = view.shape[self._axis]
            start = max(wanted.start - offset, 0)
            stop = min(wanted.stop - offset, length)
            if start < stop:
                own = _with_axis(box, self._axis, start, stop)
                parts.append(view.read(own))
            offset += length

        if not parts:
            return np.empty(lengths_of(box), self.dtype)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts, self._axis)


class Part(View):
    """A range of a view along an axis."""

    def __init__(self, view: View, axis: int, start: int, size: int) -> None:
        self._view = view
        self._axis = axis
        self._start = start
        self.shape = _with_size(view.shape, axis, size)
        self.dtype = view.dtype

    def read(self, box: Box) -> np.ndarray:
        wanted = box[self._axis]
        start = self._start + wanted.start
        stop = self._start + wanted.stop
        return self._view.read(_with_axis(box, self._axis, start, stop))


class Stacked(View):
    """Views of equal shape, along a new first axis."""

    def __init__(self, views: Sequence[View]) -> None:
        first = _check_alike(views)
        self._views = views
        self.shape = (len(views), *first.shape)
        self.dtype = first.dtype

    def read(self, box: Box) -> np.ndarray:
        result = np.empty(lengths_of(box), self.dtype)
        for place, view in enumerate(self._views[box[0]]):
            result[place] = view.read(box[1:])
        return result


class Indexed(View):
    """One entry of a view along its first axis."""

    def __init__(self, view: View, index: int) -> None:
        self._view = view
        self._index = index
        self.shape = view.shape[1:]
        self.dtype = view.dtype

    def read(self, box: Box) -> np.ndarray:
        first = slice(self._index, self._index + 1)
        return self._view.read((first, *box))[0]


class Cast(View):
    """A view with another dtype of floats, whose values must fit into that dtype."""

    def __init__(self, view: View, dtype: Any) -> None:
        self._view = view
        self.shape = view.shape
        self.dtype = np.dtype(dtype)
        self._may_overflow = _largest(view.dtype) > _largest(self.dtype)

    def read(self, box: Box) -> np.ndarray:
        values = self._view.read(box)
        if not self._may_overflow:
            return values.astype(self.dtype)

        with np.errstate(over="ignore"):
            result = values.astype(self.dtype)
        # A large number becomes infinite, or NaN in a dtype without infinity.
        is_lost = np.isfinite(values) & ~np.isfinite(result)
        if np.any(is_lost):
            value = float(values[is_lost].flat[0])
            raise OverflowError(f"{value:.6g} is too large for {self.dtype}")
        return result


@contextlib.contextmanager
def naming_casts(name: str, outcome: str) -> Iterator[None]:
    """Names the array in the error about a value that does not fit its dtype."""
    try:
        yield
    except OverflowError as error:
        message = (
            f"`{name}` cannot be cast: {error}. Use a dtype with the range of these "
            f"values, such as `bfloat16` instead of `float16`. {outcome}"
        )
        raise CheckpointMismatchError(message.rstrip()) from error


def _largest(dtype: np.dtype) -> float:
    """Returns the largest finite number of a dtype of floats."""
    return float(ml_dtypes.finfo(dtype).max)


def lengths_of(box: Sequence[slice]) -> list[int]:
    return [each.stop - each.start for each in box]


def _with_size(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _with_axis(box: Box, axis: int, start: int, stop: int) -> Box:
    return (*box[:axis], slice(start, stop), *box[axis + 1 :])


def _check_alike(views: Sequence[View], axis: int | None = None) -> View:
    """Returns the first view; raises if the others differ, except along an axis."""
    first = views[0]
    if axis is not None and axis >= len(first.shape):
        raise ValueError(f"{first} has no axis {axis}")
    expected = _without_axis(first.shape, axis)
    for view in views:
        has_dtype = view.dtype == first.dtype
        has_shape = _without_axis(view.shape, axis) == expected
        if not has_dtype or not has_shape:
            raise ValueError(f"{first} and {view} do not go into one array")
    return first


def _without_axis(shape: Shape, axis: int | None) -> list[int]:
    return [size for place, size in enumerate(shape) if place != axis]
