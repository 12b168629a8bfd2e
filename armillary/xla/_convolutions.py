"""A convolution in a form that XLA's CPU compiler runs fast wherever it stands.

The compiler has fast code for one order of axes only: images as (batch, *space,
feature), kernels as (*space, input, output). It puts a convolution into that order in
the outermost part of a program and nowhere else, and the gradients of every convolution
are in another order. Within a loop they run as naive loops, ten times slower
(https://github.com/jax-ml/jax/issues/12868). So they are put in order before the
compiler sees them.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from armillary.xla._grouped import (
    convolve_by_position,
    convolve_by_tap,
    split_groups,
)

MOST_TERMS = 64
"""Most products that one convolution is written out as: an 8 by 8 window's."""


class Form(enum.Enum):
    """How a convolution is computed; the choice depends on shapes and nothing else."""

    UNCHANGED = enum.auto()
    """As JAX has it."""

    ORDERED = enum.auto()
    """As one convolution in the canonical order of axes."""

    BY_TAP = enum.auto()
    """As a sum over the taps of a small window."""

    BY_POSITION = enum.auto()
    """As one matrix product for each place of a large window."""


def choose_form(parameters: Mapping[str, Any], lhs: Any, rhs: Any, out: Any) -> Form:
    """Returns the form for a convolution of values with these abstract values."""
    numbers = parameters["dimension_numbers"]
    is_grouped = (
        parameters["feature_group_count"] != 1 or parameters["batch_group_count"] != 1
    )
    if not is_grouped and is_ordered(parameters):
        return Form.UNCHANGED
    if not is_free(parameters["out_sharding"]) or not all(
        map(has_plain_shape, (lhs, rhs, out))
    ):
        return Form.UNCHANGED
    if not is_grouped:
        return Form.ORDERED
    taps = math.prod(rhs.shape[axis] for axis in numbers.rhs_spec[2:])
    positions = math.prod(out.shape[axis] for axis in numbers.out_spec[2:])
    if parameters["batch_group_count"] != 1:
        # In order, they are no faster in a loop and up to 100 times slower outside.
        return Form.BY_POSITION if positions <= MOST_TERMS else Form.UNCHANGED
    if positions < taps and positions <= MOST_TERMS:
        return Form.BY_POSITION
    if rhs.shape[numbers.rhs_spec[1]] == 1 and taps <= MOST_TERMS:
        return Form.BY_TAP
    return Form.UNCHANGED if is_ordered(parameters) else Form.ORDERED


def is_ordered(parameters: Mapping[str, Any]) -> bool:
    """Returns whether the axes are in the canonical order already."""
    numbers = parameters["dimension_numbers"]
    return tuple(map(tuple, numbers)) == tuple(_canonical(len(numbers.lhs_spec)))


def example_axes(
    parameters: Mapping[str, Any],
) -> tuple[int | None, int | None, int | None]:
    """Returns along which axis both operands and the result of one may be divided.

    That is the axis of examples, which images have first. So a convolution that adds
    over the first axis of its first operand is the gradient of another one with respect
    to the weights. In batch groups, XLA divides it wrongly (JAX 0.10.2).
    """
    numbers = parameters["dimension_numbers"]
    if parameters["batch_group_count"] != 1:
        return None, None, None
    if numbers.lhs_spec[1] == 0:
        return 0, numbers.rhs_spec[1], None
    return numbers.lhs_spec[0], None, numbers.out_spec[0]


def has_plain_shape(value: Any) -> bool:
    """Returns whether a shape is of known sizes, none of them 0, and sharded freely.

    Axes that the user shards explicitly keep the order in which the user names them.
    """
    return all(
        isinstance(size, int | np.integer) and size > 0 for size in value.shape
    ) and is_free(value.sharding)


def is_free(sharding: Any) -> bool:
    """Returns whether a sharding names no axis, as those within `jax.shard_map`."""
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
        canonical = lax.ConvDimensionNumbers(*_canonical(lhs.ndim))
        result = lax.conv_general_dilated_p.bind(
            images,
            kernel,
            **(parameters | {"dimension_numbers": canonical, "out_sharding": None}),
        )
    else:
        result = _convolve_grouped(images, kernel, form, parameters)
    return lax.transpose(result, np.argsort(_features_last(numbers.out_spec)))


def _convolve_grouped(
    images: jax.Array, kernel: jax.Array, form: Form, parameters: dict[str, Any]
) -> jax.Array:
    padding = [
        (low, high, dilation - 1)
        for (low, high), dilation in zip(
            parameters["padding"], parameters["lhs_dilation"], strict=True
        )
    ]
    zero = jnp.zeros((), images.dtype)
    images = lax.pad(images, zero, [(0, 0, 0), *padding, (0, 0, 0)])
    dtype = parameters["preferred_element_type"]
    steps: dict[str, Any] = {
        "strides": parameters["window_strides"],
        "dilation": parameters["rhs_dilation"],
        "dtype": images.dtype if dtype is None else dtype,
    }
    if form is Form.BY_TAP:
        return convolve_by_tap(images, kernel, **steps)
    groups = split_groups(
        images,
        feature_groups=parameters["feature_group_count"],
        batch_groups=parameters["batch_group_count"],
    )
    return convolve_by_position(
        groups, kernel, precision=parameters["precision"], **steps
    )


def _canonical(ndim: int) -> tuple[tuple[int, ...], ...]:
    space = tuple(range(ndim - 2))
    images = (0, ndim - 1, *(axis + 1 for axis in space))
    return images, (ndim - 1, ndim - 2, *space), images


def _features_last(spec: Sequence[int]) -> tuple[int, ...]:
    return (spec[0], *spec[2:], spec[1])
