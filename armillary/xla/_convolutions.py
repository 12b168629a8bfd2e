"""Convolutions and max-pooling in forms that XLA's CPU compiler runs fast anywhere.

The compiler has fast code for one order of axes only: images as (batch, *space,
feature), kernels as (*space, input, output). It puts a convolution into that order in
the outermost part of a program alone, and within a loop, others run ten times slower
(https://github.com/jax-ml/jax/issues/12868). So they are put in order before.

It has no fast code for groups of features. As ordinary arithmetic, a step of a network
with depthwise convolutions took 110 ms instead of 270 ms in a loop, and one with 8
groups of 4 features 80 ms instead of 960 ms outside of loops.

The gradient of max-pooling becomes a reduction of pairs and a scatter: a small
network's step took 43 ms with what is here, 105 ms without. Here each window remembers
which of its taps won, and each element of the result asks the windows it lies in.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MOST_TERMS = 64
"""The most products or comparisons that replace one operation: an 8 by 8 window's."""

PARAMETERS = frozenset(
    {
        "batch_group_count",
        "dimension_numbers",
        "feature_group_count",
        "lhs_dilation",
        "out_sharding",
        "padding",
        "precision",
        "preferred_element_type",
        "rhs_dilation",
        "window_strides",
    }
)
"""The parameters of a convolution in the releases of JAX that this module supports.

A convolution with other parameters is left unchanged.
"""


class Form(enum.Enum):
    """The ways to compute a convolution; the choice depends only on shapes."""

    UNCHANGED = "as JAX has it"
    ORDERED = "as one convolution in the canonical order of axes"
    BY_TAP = "as a sum over the taps of a small window"
    BY_POSITION = "as one matrix product for each place of a large window"


def choose_form(parameters: Mapping[str, Any], lhs: Any, rhs: Any, out: Any) -> Form:
    """Returns the form for a convolution of values with these abstract values."""
    if parameters.keys() != PARAMETERS:
        return Form.UNCHANGED
    numbers = parameters["dimension_numbers"]
    is_in_order = is_ordered(parameters)
    has_batch_groups = parameters["batch_group_count"] != 1
    is_grouped = parameters["feature_group_count"] != 1 or has_batch_groups
    is_plain = all(map(_has_plain_shape, (lhs, rhs, out)))
    if not is_plain or not _is_free(parameters["out_sharding"]):
        return Form.UNCHANGED
    if not is_grouped:
        return Form.UNCHANGED if is_in_order else Form.ORDERED
    taps = math.prod(rhs.shape[axis] for axis in numbers.rhs_spec[2:])
    positions = math.prod(out.shape[axis] for axis in numbers.out_spec[2:])
    if has_batch_groups:
        # In canonical order, convolutions with batch groups are not faster in a loop,
        # and up to 100 times slower outside.
        return Form.BY_POSITION if positions <= MOST_TERMS else Form.UNCHANGED
    if positions < taps and positions <= MOST_TERMS:
        return Form.BY_POSITION
    if rhs.shape[numbers.rhs_spec[1]] == 1 and taps <= MOST_TERMS:
        return Form.BY_TAP
    return Form.UNCHANGED if is_in_order else Form.ORDERED


def is_ordered(parameters: Mapping[str, Any]) -> bool:
    numbers = parameters["dimension_numbers"]
    return tuple(map(tuple, numbers)) == _canonical(len(numbers.lhs_spec))


def example_axes(parameters: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Returns the axis of examples of both operands and of the result.

    A convolution may be divided along it. Images have their examples on the first axis.
    So a convolution that adds over the first axis of its first operand is the gradient
    of another one with respect to the weights. XLA divides a convolution with batch
    groups wrongly (JAX 0.10.2), so it has no such axis.
    """
    numbers = parameters["dimension_numbers"]
    if parameters["batch_group_count"] != 1:
        return None, None, None
    if numbers.lhs_spec[1] == 0:
        return 0, numbers.rhs_spec[1], None
    return numbers.lhs_spec[0], None, numbers.out_spec[0]


def _has_plain_shape(value: Any) -> bool:
    """Returns whether all sizes of a shape are known and not 0, and no axis sharded."""
    return all(
        isinstance(size, int | np.integer) and size > 0 for size in value.shape
    ) and _is_free(value.sharding)


def _is_free(sharding: Any) -> bool:
    """Returns whether a sharding names no axis, which holds inside `jax.shard_map`."""
    return sharding is None or all(name is None for name in sharding.spec)


def convolve(
    lhs: jax.Array, rhs: jax.Array, *, form: Form, **parameters: Any
) -> jax.Array:
    """Computes `jax.lax.conv_general_dilated_p` in a form that `choose_form` chose."""
    numbers = parameters["dimension_numbers"]
    outputs, inputs, *space = numbers.rhs_spec
    images = lax.transpose(lhs, _features_last(numbers.lhs_spec))
    kernel = lax.transpose(rhs, (*space, inputs, outputs))
    if form is Form.ORDERED:
        order = lax.ConvDimensionNumbers(*_canonical(lhs.ndim))
        changes = {"dimension_numbers": order, "out_sharding": None}
        result = lax.conv_general_dilated_p.bind(
            images, kernel, **(parameters | changes)
        )
    else:
        edges = zip(parameters["padding"], parameters["lhs_dilation"], strict=True)
        padding = [(low, high, dilation - 1) for (low, high), dilation in edges]
        zero = jnp.zeros((), images.dtype)
        images = lax.pad(images, zero, [(0, 0, 0), *padding, (0, 0, 0)])
        write_out = _add_taps if form is Form.BY_TAP else _multiply_positions
        result = write_out(images, kernel, parameters)
    return lax.transpose(result, np.argsort(_features_last(numbers.out_spec)))


def _add_taps(
    images: jax.Array, kernel: jax.Array, parameters: Mapping[str, Any]
) -> jax.Array:
    """Convolves each feature on its own: all taps become one loop over the result."""
    window = kernel.shape[:-2]
    strides, dilation = parameters["window_strides"], parameters["rhs_dilation"]
    places = _count_places(images.shape[1:-1], window, parameters)
    dtype = _result_dtype(images, parameters)
    wide, repeats = _accumulator(dtype), kernel.shape[-1] // images.shape[-1]
    total = None
    for tap in np.ndindex(window):
        begin = [i * step for i, step in zip(tap, dilation, strict=True)]
        part = _take_space(images, begin, places, strides).astype(wide)
        part = jnp.repeat(part, repeats, axis=-1)
        weight = kernel[*tap, 0].astype(wide)
        term = part * lax.broadcast_in_dim(weight, part.shape, (part.ndim - 1,))
        total = term if total is None else total + term
    assert total is not None
    return total.astype(dtype)


def _multiply_positions(
    images: jax.Array, kernel: jax.Array, parameters: Mapping[str, Any]
) -> jax.Array:
    """Convolves with a window almost as large as the image."""
    groups = parameters["batch_group_count"]
    if groups > 1:
        images = images.reshape(groups, -1, *images.shape[1:])
    else:
        groups = parameters["feature_group_count"]
        images = images.reshape(*images.shape[:-1], groups, -1)
        images = jnp.moveaxis(images, -2, 0)
    # Images are (group, batch, *space, feature) now, and kernels:
    kernel = kernel.reshape(*kernel.shape[:-1], groups, -1)
    window = kernel.shape[:-3]
    strides, dilation = parameters["window_strides"], parameters["rhs_dilation"]
    places = _count_places(images.shape[2:-1], window, parameters)
    dtype, summed = _result_dtype(images, parameters), len(window) + 1
    products = []
    for place in np.ndindex(places):
        begin = [i * stride for i, stride in zip(place, strides, strict=True)]
        product = lax.dot_general(
            _take_space(images, begin, window, dilation),
            kernel,
            ((tuple(range(2, 2 + summed)), tuple(range(summed))), ((0,), (summed,))),
            precision=parameters["precision"],
            preferred_element_type=_accumulator(dtype),
        )
        products.append(product.astype(dtype))
    # From position, group, batch, output to batch, *space, group and output in one.
    result = jnp.stack(products).transpose(2, 0, 1, 3)
    return result.reshape(result.shape[0], *places, -1)


def _count_places(
    sizes: Sequence[int], window: Sequence[int], parameters: Mapping[str, Any]
) -> tuple[int, ...]:
    steps = parameters["rhs_dilation"], parameters["window_strides"]
    return tuple(
        (size - (length - 1) * dilation - 1) // stride + 1
        for size, length, dilation, stride in zip(sizes, window, *steps, strict=True)
    )


def _take(
    array: jax.Array, begin: Sequence[int], counts: Sequence[int], steps: Sequence[int]
) -> jax.Array:
    """Takes `counts` elements, in steps, along each axis."""
    ends = [
        first + (count - 1) * step + 1
        for first, count, step in zip(begin, counts, steps, strict=True)
    ]
    return lax.slice(array, begin, ends, steps)


def _take_space(
    array: jax.Array, begin: Sequence[int], counts: Sequence[int], steps: Sequence[int]
) -> jax.Array:
    """Takes `counts` elements along the axes of space, which are before the last."""
    lead = array.ndim - len(begin) - 1
    shape, ones = array.shape, [1] * lead
    begin, counts = [*[0] * lead, *begin, 0], [*shape[:lead], *counts, shape[-1]]
    return _take(array, begin, counts, [*ones, *steps, 1])


def _result_dtype(images: jax.Array, parameters: Mapping[str, Any]) -> Any:
    dtype = parameters["preferred_element_type"]
    return images.dtype if dtype is None else dtype


def _accumulator(dtype: Any) -> Any:
    is_short = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if is_short else dtype


def _canonical(ndim: int) -> tuple[tuple[int, ...], ...]:
    space = tuple(range(ndim - 2))
    images = (0, ndim - 1, *(axis + 1 for axis in space))
    return images, (ndim - 1, ndim - 2, *space), images


def _features_last(spec: Sequence[int]) -> tuple[int, ...]:
    return (spec[0], *spec[2:], spec[1])


def is_supported(parameters: Mapping[str, Any], source: Any, operand: Any) -> bool:
    """Returns whether `scatter_to_winners` can compute a gradient of pooling."""
    return (
        len(parameters) == 4  # `scatter_to_winners` knows only these parameters.
        and parameters["select_prim"] in (lax.ge_p, lax.le_p)
        and jnp.issubdtype(operand.dtype, jnp.floating)
        and math.prod(parameters["window_dimensions"]) <= MOST_TERMS
        and _has_plain_shape(source)
        and _has_plain_shape(operand)
    )


def scatter_to_winners(
    source: jax.Array,
    operand: jax.Array,
    *,
    select_prim: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> jax.Array:
    """Computes `jax.lax.select_and_scatter_add_p`: adds sources where windows won."""
    worst = jnp.asarray(-np.inf if select_prim is lax.ge_p else np.inf, operand.dtype)
    padded = lax.pad(operand, worst, [(low, high, 0) for low, high in padding])
    taps = np.arange(math.prod(window_dimensions), dtype=np.int32)
    taps = taps.reshape(window_dimensions)
    winners = _find_winners(padded, source.shape, taps, select_prim, window_strides)
    # Windows that overlap are as many layers of cells as wide as a stride: the first
    # layer holds the first `stride` elements of each window, the next one the next.
    layers = [
        -(-length // stride)
        for length, stride in zip(window_dimensions, window_strides, strict=True)
    ]
    total = None
    for layer in np.ndindex(*layers):
        begin = [i * stride for i, stride in zip(layer, window_strides, strict=True)]
        spread = _spread(source, winners, _cut_cell(taps, begin, window_strides))
        edges = [
            (first - low, size - (first - low) - length, 0)
            for first, (low, _), size, length in zip(
                begin, padding, operand.shape, spread.shape, strict=True
            )
        ]
        placed = lax.pad(spread, jnp.zeros((), spread.dtype), edges)
        total = placed if total is None else total + placed
    assert total is not None
    return total


def _find_winners(
    padded: jax.Array,
    shape: Sequence[int],
    taps: np.ndarray,
    select_prim: Any,
    strides: Sequence[int],
) -> jax.Array:
    """Returns the tap that won in each window; of equal values, the first one."""
    best = None
    winners = jnp.zeros(shape, taps.dtype)
    for place in np.ndindex(taps.shape):
        value = _take(padded, place, shape, strides)
        if best is None:
            best = value
        else:
            stays = select_prim.bind(best, value)
            best = jnp.where(stays, best, value)
            winners = jnp.where(stays, winners, taps[place])
    return winners


def _cut_cell(
    taps: np.ndarray, begin: Sequence[int], sizes: Sequence[int]
) -> np.ndarray:
    """Returns the taps of one layer's cell, with -1 outside of the window."""
    part = taps[tuple(slice(b, b + n) for b, n in zip(begin, sizes, strict=True))]
    missing = [(0, n - have) for n, have in zip(sizes, part.shape, strict=True)]
    return np.pad(part, missing, constant_values=-1)


def _spread(source: jax.Array, winners: jax.Array, cell: np.ndarray) -> jax.Array:
    """Turns each source into a cell that is 0 except at the place of the winner."""
    pairs = list(zip(source.shape, cell.shape, strict=True))
    shape = [size for pair in pairs for size in pair]
    outer, inner = range(0, len(shape), 2), range(1, len(shape), 2)
    cells = lax.broadcast_in_dim(cell, shape, inner)
    hit = lax.broadcast_in_dim(winners, shape, outer) == cells
    values = lax.broadcast_in_dim(source, shape, outer)
    spread = jnp.where(hit, values, jnp.zeros((), source.dtype))
    return spread.reshape([n * m for n, m in pairs])
