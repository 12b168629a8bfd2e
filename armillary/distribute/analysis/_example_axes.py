"""Follows the axes of a value through one operation.

Axes are counted from the last one, -1, so that they stay the same where a loop takes a
value apart along its first axis.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

# Operations whose result may have other sizes along the same axes.
_SAME_AXES = (
    *("concatenate", "pad", "slice", "dynamic_slice", "dynamic_update_slice", "rev"),
    *("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"),
    *("select_and_gather_add", "select_and_scatter_add"),
)
# Operations whose result lacks some axes of their operand, and the parameter that names
# these axes.
_REMOVED = {
    "squeeze": "dimensions",
    "reduce_sum": "axes",
    "reduce_prod": "axes",
    "reduce_max": "axes",
    "reduce_min": "axes",
    "reduce_and": "axes",
    "reduce_or": "axes",
    "reduce_xor": "axes",
    "argmax": "axes",
    "argmin": "axes",
}


def axes_of_result(equation: Any, index: int, axis: int) -> Iterator[int]:
    """Yields the axes of the result that an axis of an operand becomes.

    It yields nothing if the operation reduces over the axis, or is not known.

    Args:
        equation: The operation.
        index: The number of the operand.
        axis: The axis of the operand, counted from the last one.
    """
    name = equation.primitive.name
    params = equation.params
    shape = equation.invars[index].aval.shape
    result = equation.outvars[0].aval.shape if equation.outvars else ()
    place = axis + len(shape)
    if place < 0:
        return  # A loop has taken the value apart along this axis.

    if name == "broadcast_in_dim":
        # Along an axis that was copied, the numbers are equal.
        target = params["broadcast_dimensions"][place]
        if shape[place] == result[target]:
            yield target - len(result)
    elif name == "transpose":
        yield params["permutation"].index(place) - len(result)
    elif name == "reshape":
        yield from _axes_of_reshaped(shape, result, place)
    elif name == "dot_general":
        yield from _axes_of_product(equation, index, place)
    elif name == "conv_general_dilated":
        # A spec begins with the axis of the batch. A kernel has no such axis.
        numbers = params["dimension_numbers"]
        is_batch = index == 0 and place == numbers.lhs_spec[0]
        if is_batch:
            yield numbers.out_spec[0] - len(result)
    elif name == "gather":
        yield from _axes_of_gathered(equation, index, place)
    elif name.startswith("scatter"):
        yield from _axes_of_scattered(equation, index, place)
    elif name in _REMOVED:
        removed = params[_REMOVED[name]]
        if place not in removed:
            num_before = sum(gone < place for gone in removed)
            yield place - num_before - len(result)
    elif len(shape) == len(result):
        # Any operation with such shapes works on each number alone, or along an axis.
        is_kept = shape[place] == result[place] and _fit(shape, result)
        if is_kept or name in _SAME_AXES:
            yield axis


def _fit(shape: Sequence[int], result: Sequence[int]) -> bool:
    """Returns whether the shapes fit an elementwise operation."""
    pairs = zip(shape, result, strict=True)
    return all(size in (1, other) for size, other in pairs)


def _axes_of_reshaped(
    shape: Sequence[int], result: Sequence[int], place: int
) -> Iterator[int]:
    """Yields the new axes that overlap an axis of the old shape.

    An axis covers the strides from one step along it to one step along the axis before.
    Two axes overlap if their strides do.
    """
    step = math.prod(shape[place + 1 :])
    end = step * shape[place]
    num_axes = len(result)
    for target in range(num_axes):
        new_step = math.prod(result[target + 1 :])
        new_end = new_step * result[target]
        overlaps = max(step, new_step) < min(end, new_end)
        if overlaps:
            yield target - num_axes


def _axes_of_gathered(equation: Any, index: int, place: int) -> Iterator[int]:
    """Yields the axis of gathered values, of an axis of the operand or the indices."""
    numbers = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    num_axes = equation.outvars[0].aval.ndim
    # The axes of the result are axes of the indices, or of the gathered windows.
    of_windows = numbers.offset_dims
    of_indices = [axis for axis in range(num_axes) if axis not in of_windows]
    batching = _batching_of(numbers, "operand")

    if index == 1:
        # The last axis of the indices is the axis of coordinates.
        is_coordinates = place >= len(of_indices)
        if not is_coordinates:
            yield of_indices[place] - num_axes
    elif place in batching:
        batching_of_indices = _batching_of(numbers, "start_indices")
        paired = batching_of_indices[batching.index(place)]
        yield of_indices[paired] - num_axes
    elif equation.params["slice_sizes"][place] == shape[place]:
        # A window with the full axis has all examples.
        gone = (*numbers.collapsed_slice_dims, *batching)
        windows = [axis for axis in range(len(shape)) if axis not in gone]
        if place in windows:
            yield of_windows[windows.index(place)] - num_axes


def _axes_of_scattered(equation: Any, index: int, place: int) -> Iterator[int]:
    """Yields the axis of the result that an axis of examples is scattered along.

    It is known only if each example is scattered into its own row.
    """
    # The operands are the array, the indices, and the updates to scatter.
    num_axes = equation.outvars[0].aval.ndim
    if index == 0:
        yield place - num_axes
        return

    numbers = equation.params["dimension_numbers"]
    if index == 2:
        # From an axis of the updates to the axis of the indices that it follows.
        windows = numbers.update_window_dims
        axes = range(equation.invars[2].aval.ndim)
        of_indices = [axis for axis in axes if axis not in windows]
        if place not in of_indices:
            return
        place = of_indices.index(place)
    batching = _batching_of(numbers, "operand")
    paired = _batching_of(numbers, "scatter_indices")
    if place in paired:
        yield batching[paired.index(place)] - num_axes


def _batching_of(numbers: Any, name: str) -> tuple[int, ...]:
    """Returns the axes of a gather or scatter that index each example separately."""
    return tuple(getattr(numbers, f"{name}_batching_dims"))


def _axes_of_product(equation: Any, index: int, place: int) -> Iterator[int]:
    """Yields the axis of a product, unless the product sums over it."""
    contracted, batch = equation.params["dimension_numbers"]
    num_axes = equation.outvars[0].aval.ndim
    free: list[list[int]] = []
    for side in range(2):
        axes = range(equation.invars[side].aval.ndim)
        used = (*contracted[side], *batch[side])
        free.append([axis for axis in axes if axis not in used])
    own_batch = list(batch[index])
    own_free = free[index]

    # The result has the batch axes first, then the free axes of the two operands.
    if place in own_batch:
        yield own_batch.index(place) - num_axes
    elif place in own_free:
        num_before = len(own_batch)
        if index == 1:
            num_before += len(free[0])
        yield num_before + own_free.index(place) - num_axes
