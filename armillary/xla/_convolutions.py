"""Convolutions in forms that XLA's CPU compiler runs fast anywhere.

The compiler has fast code for one order of axes only: images as (batch, *space,
feature), kernels as (*space, input, output). It puts a convolution into that order in
the outermost part of a program alone, and within a loop, others run ten times slower
(https://github.com/jax-ml/jax/issues/12868). So they are put in order before.

It has no fast code for groups of features. As ordinary arithmetic, a step of a network
with depthwise convolutions took 110 ms instead of 270 ms in a loop, and one with 8
groups of 4 features 80 ms instead of 960 ms outside of loops.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MAX_TERMS = 64
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
    is_plain = all(map(has_plain_shape, (lhs, rhs, out)))
    if not is_plain or not _is_free(parameters["out_sharding"]):
        return Form.UNCHANGED

    as_one = Form.UNCHANGED if is_ordered(parameters) else Form.ORDERED
    has_batch_groups = parameters["batch_group_count"] != 1
    if parameters["feature_group_count"] == 1 and not has_batch_groups:
        return as_one

    numbers = parameters["dimension_numbers"]
    _, input_axis, *axes_of_window = numbers.rhs_spec
    _, _, *axes_of_positions = numbers.out_spec
    num_taps = math.prod(rhs.shape[axis] for axis in axes_of_window)
    num_positions = math.prod(out.shape[axis] for axis in axes_of_positions)
    has_few_positions = num_positions <= MAX_TERMS
    if has_batch_groups:
        # In canonical order, convolutions with batch groups are not faster in a loop,
        # and up to 100 times slower outside.
        return Form.BY_POSITION if has_few_positions else Form.UNCHANGED

    if num_positions < num_taps and has_few_positions:
        return Form.BY_POSITION
    is_depthwise = rhs.shape[input_axis] == 1
    if is_depthwise and num_taps <= MAX_TERMS:
        return Form.BY_TAP
    return as_one


def is_ordered(parameters: Mapping[str, Any]) -> bool:
    """Returns whether the axes of a convolution already have the fast order."""
    numbers = parameters["dimension_numbers"]
    order = tuple(map(tuple, numbers))
    return order == _canonical(len(numbers.lhs_spec))


def example_axes(parameters: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Returns the axis of examples of both operands and of the result.

    A convolution may be divided along it. Images have their examples on the first axis.
    So a convolution that adds over the first axis of its first operand is the gradient
    of another one with respect to the weights. XLA divides a convolution with batch
    groups wrongly (JAX 0.10.2), so it has no such axis.
    """
    if parameters["batch_group_count"] != 1:
        return None, None, None
    numbers = parameters["dimension_numbers"]
    batch_axis, feature_axis, *_ = numbers.lhs_spec
    is_gradient_of_weights = feature_axis == 0
    if is_gradient_of_weights:
        return 0, numbers.rhs_spec[1], None
    return batch_axis, None, numbers.out_spec[0]


def has_plain_shape(value: Any) -> bool:
    """Returns whether all sizes of a shape are known and not 0, and no axis sharded."""
    for size in value.shape:
        is_known = isinstance(size, int | np.integer)
        if not is_known or size <= 0:
            return False
    return _is_free(value.sharding)


def _is_free(sharding: Any) -> bool:
    """Returns whether a sharding names no axis, which holds inside `jax.shard_map`."""
    if sharding is None:
        return True
    return all(name is None for name in sharding.spec)


def convolve(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    form: Form,
    **parameters: Any,
) -> jax.Array:
    """Computes `jax.lax.conv_general_dilated_p` in a form that `choose_form` chose."""
    numbers = parameters["dimension_numbers"]
    outputs, inputs, *space = numbers.rhs_spec
    images = lax.transpose(lhs, _features_last(numbers.lhs_spec))
    kernel = lax.transpose(rhs, (*space, inputs, outputs))
    if form is Form.ORDERED:
        result = _convolve_in_order(images, kernel, parameters)
    else:
        images = _pad_space(images, parameters)
        write_out = _add_taps if form is Form.BY_TAP else _multiply_positions
        result = write_out(images, kernel, parameters)
    order_of_caller = np.argsort(_features_last(numbers.out_spec))
    return lax.transpose(result, order_of_caller)


def _convolve_in_order(
    images: jax.Array, kernel: jax.Array, parameters: Mapping[str, Any]
) -> jax.Array:
    """Convolves by the same operation, with axes in canonical order."""
    ordered = dict(parameters)
    ordered["dimension_numbers"] = lax.ConvDimensionNumbers(*_canonical(images.ndim))
    ordered["out_sharding"] = None
    return lax.conv_general_dilated_p.bind(images, kernel, **ordered)


def _pad_space(images: jax.Array, parameters: Mapping[str, Any]) -> jax.Array:
    """Writes the padding of images, and the dilation between their elements, as 0."""
    padding = parameters["padding"]
    dilations = parameters["lhs_dilation"]
    nothing = (0, 0, 0)
    of_space: list[tuple[int, int, int]] = []
    for (low, high), dilation in zip(padding, dilations, strict=True):
        num_between = dilation - 1
        of_space.append((low, high, num_between))
    edges = [nothing, *of_space, nothing]  # The batch is first, and features are last.
    zero = jnp.zeros((), images.dtype)
    return lax.pad(images, zero, edges)


def _add_taps(
    images: jax.Array, kernel: jax.Array, parameters: Mapping[str, Any]
) -> jax.Array:
    """Convolves each feature on its own: all taps become one loop over the result."""
    window = kernel.shape[:-2]
    strides = parameters["window_strides"]
    dilation = parameters["rhs_dilation"]
    places = _count_places(images.shape[1:-1], window, parameters)
    outputs_per_input = kernel.shape[-1] // images.shape[-1]
    dtype = _result_dtype(images, parameters)
    wide = _accumulator(dtype)

    total = None
    last_axis = images.ndim - 1
    for tap in np.ndindex(window):
        begin = scaled(tap, dilation)
        part = _take_space(images, begin, places, strides).astype(wide)
        part = jnp.repeat(part, outputs_per_input, axis=-1)
        weight = kernel[*tap, 0].astype(wide)
        weights = lax.broadcast_in_dim(weight, part.shape, (last_axis,))
        term = part * weights
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
    # Images are (group, batch, *space, feature) now, and kernels become
    # (*space, feature, group, output).
    kernel = kernel.reshape(*kernel.shape[:-1], groups, -1)
    window = kernel.shape[:-3]

    # A product adds over space and features, and each group has its own.
    num_added = len(window) + 1
    added_of_images = tuple(range(2, 2 + num_added))
    added_of_kernel = tuple(range(num_added))
    added = added_of_images, added_of_kernel
    shared = (0,), (num_added,)

    strides = parameters["window_strides"]
    dilation = parameters["rhs_dilation"]
    places = _count_places(images.shape[2:-1], window, parameters)
    dtype = _result_dtype(images, parameters)
    products: list[jax.Array] = []
    for place in np.ndindex(places):
        begin = scaled(place, strides)
        seen = _take_space(images, begin, window, dilation)
        product = lax.dot_general(
            seen,
            kernel,
            (added, shared),
            precision=parameters["precision"],
            preferred_element_type=_accumulator(dtype),
        )
        products.append(product.astype(dtype))
    # From position, group, batch, output to batch, *space, group and output in one.
    result = jnp.stack(products).transpose(2, 0, 1, 3)
    batch_size = result.shape[0]
    return result.reshape(batch_size, *places, -1)


def _count_places(
    sizes: Sequence[int],
    window: Sequence[int],
    parameters: Mapping[str, Any],
) -> tuple[int, ...]:
    """Returns the number of places of a window along each axis of the images."""
    dilations = parameters["rhs_dilation"]
    strides = parameters["window_strides"]
    counts: list[int] = []
    axes = zip(sizes, window, dilations, strides, strict=True)
    for size, length, dilation, stride in axes:
        reach = (length - 1) * dilation
        last_begin = size - reach - 1
        counts.append(last_begin // stride + 1)
    return tuple(counts)


def scaled(place: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Returns where a place begins along each axis: its index times the step."""
    return [index * step for index, step in zip(place, steps, strict=True)]


def take(
    array: jax.Array,
    begin: Sequence[int],
    counts: Sequence[int],
    steps: Sequence[int],
) -> jax.Array:
    """Takes `counts` elements, in steps, along each axis."""
    ends = [
        first + (count - 1) * step + 1
        for first, count, step in zip(begin, counts, steps, strict=True)
    ]
    return lax.slice(array, begin, ends, steps)


def _take_space(
    array: jax.Array,
    begin: Sequence[int],
    counts: Sequence[int],
    steps: Sequence[int],
) -> jax.Array:
    """Takes `counts` elements along the axes of space, which are before the last."""
    num_before = array.ndim - len(begin) - 1
    sizes_before = array.shape[:num_before]
    num_features = array.shape[-1]
    # The other axes are taken whole: from 0, and in steps of 1.
    begins = [*[0] * num_before, *begin, 0]
    all_counts = [*sizes_before, *counts, num_features]
    all_steps = [*[1] * num_before, *steps, 1]
    return take(array, begins, all_counts, all_steps)


def _result_dtype(images: jax.Array, parameters: Mapping[str, Any]) -> Any:
    dtype = parameters["preferred_element_type"]
    return images.dtype if dtype is None else dtype


def _accumulator(dtype: Any) -> Any:
    """Returns the dtype in which terms are added: floats have at least 32 bits."""
    is_floating = jnp.issubdtype(dtype, jnp.floating)
    is_short = is_floating and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if is_short else dtype


def _canonical(ndim: int) -> tuple[tuple[int, ...], ...]:
    """Returns the axes of images, kernels and results in the order that is fast."""
    last = ndim - 1
    images = (0, last, *range(1, last))
    kernels = (last, last - 1, *range(last - 1))
    return images, kernels, images


def _features_last(spec: Sequence[int]) -> tuple[int, ...]:
    batch, features, *space = spec
    return (batch, *space, features)
