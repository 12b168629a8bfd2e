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
# Operations without some axes of their operand, and the parameter that names these.
_REMOVED = {
    "squeeze": "dimensions",
    **dict.fromkeys(("reduce_sum", "reduce_prod", "reduce_max", "reduce_min"), "axes"),
    **dict.fromkeys(("reduce_and", "reduce_or", "reduce_xor"), "axes"),
    **dict.fromkeys(("argmax", "argmin"), "axes"),
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
        numbers = params["dimension_numbers"]
        if index == 0 and place == numbers.lhs_spec[0]:
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
    for target in range(len(result)):
        new_step = math.prod(result[target + 1 :])
        new_end = new_step * result[target]
        if max(step, new_step) < min(end, new_end):
            yield target - len(result)


def _axes_of_gathered(equation: Any, index: int, place: int) -> Iterator[int]:
    """Yields the axis of gathered values, of an axis of the operand or the indices."""
    numbers = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    result = equation.outvars[0].aval.shape
    # The axes of the result are axes of the indices, or of the gathered windows.
    of_windows = numbers.offset_dims
    of_indices = [axis for axis in range(len(result)) if axis not in of_windows]
    batching = _batching_of(numbers, "operand")
    if index == 1:
        # The last axis of the indices is the axis of coordinates.
        if place < len(of_indices):
            yield of_indices[place] - len(result)
    elif place in batching:
        paired = _batching_of(numbers, "start_indices")[batching.index(place)]
        yield of_indices[paired] - len(result)
    elif equation.params["slice_sizes"][place] == shape[place]:
        # A window with the full axis has all examples.
        gone = (*numbers.collapsed_slice_dims, *batching)
        windows = [axis for axis in range(len(shape)) if axis not in gone]
        if place in windows:
            yield of_windows[windows.index(place)] - len(result)


def _axes_of_scattered(equation: Any, index: int, place: int) -> Iterator[int]:
    """Yields the axis of the result that an axis of examples is scattered along.

    It is known only if each example is scattered into its own row.
    """
    numbers = equation.params["dimension_numbers"]
    result = equation.outvars[0].aval.shape
    batching = _batching_of(numbers, "operand")
    paired = _batching_of(numbers, "scatter_indices")
    if index == 0:
        yield place - len(result)
        return
    if index == 2:
        # From an axis of the updates to the axis of the indices that it follows.
        windows = numbers.update_window_dims
        num_axes = equation.invars[2].aval.ndim
        of_indices = [axis for axis in range(num_axes) if axis not in windows]
        if place not in of_indices:
            return
        place = of_indices.index(place)
    if place in paired:
        yield batching[paired.index(place)] - len(result)


def _batching_of(numbers: Any, name: str) -> tuple[int, ...]:
    """Returns the axes of a gather or scatter that index each example separately."""
    return tuple(getattr(numbers, f"{name}_batching_dims"))


def _axes_of_product(equation: Any, index: int, place: int) -> Iterator[int]:
    """Yields the axis of a product, unless the product sums over it."""
    contracted, batch = equation.params["dimension_numbers"]
    result = equation.outvars[0].aval.shape
    free: list[list[int]] = []
    for side in range(2):
        axes = range(equation.invars[side].aval.ndim)
        used = (*contracted[side], *batch[side])
        free.append([axis for axis in axes if axis not in used])

    # The result has the batch axes first, then the free axes of the two operands.
    if place in batch[index]:
        yield list(batch[index]).index(place) - len(result)
    elif place in free[index]:
        num_before = len(batch[0])
        if index == 1:
            num_before += len(free[0])
        yield num_before + free[index].index(place) - len(result)
