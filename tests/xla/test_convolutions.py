"""Tests that fast convolutions and max-pooling on CPUs equal JAX's own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

from armillary.xla._compile import has_slow_loop
from armillary.xla._convolutions import (
    Form,
    choose_form,
    convolve,
)
from armillary.xla._pooling import scatter_to_winners
from tests.tiers import slow_after_first
from tests.xla.arrays import IMAGES, assert_close, make

FEATURES_FIRST = ("NCHW", "OIHW", "NCHW")


def convolution(**changes: Any) -> Callable[..., jax.Array]:
    """Returns a convolution of images, of steps of one, padded to the same size."""
    options = {
        "window_strides": (1, 1),
        "padding": "SAME",
        "dimension_numbers": IMAGES,
    }
    return partial(lax.conv_general_dilated, **(options | changes))


def find_convolutions(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns the convolutions of a function and of its gradients, as equations."""

    def compute(*args: jax.Array) -> jax.Array:
        result = fn(*args)
        return (result * jnp.conj(result)).real.astype(jnp.float32).sum()

    program = jax.make_jaxpr(jax.grad(compute, argnums=tuple(range(len(args)))))(*args)
    return [
        equation
        for equation in program.eqns
        if equation.primitive is lax.conv_general_dilated_p
    ]


def choose(equation: Any) -> Form:
    values = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    return choose_form(equation.params, *values)


def assert_forms_agree(equations: list[Any], tolerance: float = 1e-5) -> set[Form]:
    """Compares each equation with JAX's own and returns the forms that were used."""
    pairs = [
        [
            make(variable.aval.shape, variable.aval.dtype, seed)
            for seed, variable in enumerate(equation.invars)
        ]
        for equation in equations
    ]

    @jax.jit
    def compute(pairs: list[list[jax.Array]]) -> Any:
        return [
            (
                lax.conv_general_dilated_p.bind(*pair, **equation.params),
                convolve(*pair, form=form, **equation.params)
                if (form := choose(equation)) is not Form.UNCHANGED
                else None,
            )
            for equation, pair in zip(equations, pairs, strict=True)
        ]

    for expected, actual in compute(pairs):
        if actual is not None:
            assert actual.dtype == expected.dtype
            assert actual.shape == expected.shape
            assert_close(actual, expected, tolerance)
    return set(map(choose, equations))


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """Draws a convolution and the shapes of its image and its kernel."""
    ndim = draw(st.integers(0, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(ndim))

    letters = "XYZ"[:ndim]
    orders = [
        "".join(draw(st.permutations(letters + others)))
        for others in ("NC", "OI", "NC")
    ]
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    inputs, outputs = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    space, window = each(1, 6), each(1, 3)
    strides, dilation, spread = each(1, 2), each(1, 2), each(1, 2)
    padding = [(low, high) for low, high in zip(each(-1, 2), each(0, 2), strict=True)]
    for index in range(ndim):
        size = (space[index] - 1) * spread[index] + 1 + sum(padding[index])
        assume(size >= (window[index] - 1) * dilation[index] + 1)
    sizes = dict(zip(letters, space, strict=True))
    sizes |= {"N": draw(st.integers(1, 3)), "C": inputs * groups}
    kernel = dict(zip(letters, window, strict=True))
    kernel |= {"I": inputs, "O": outputs * groups}
    fn = partial(
        lax.conv_general_dilated,
        window_strides=strides,
        padding=padding,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        dimension_numbers=tuple(orders),
        feature_group_count=groups,
    )
    return (
        fn,
        tuple(sizes[letter] for letter in orders[0]),
        tuple(kernel[letter] for letter in orders[1]),
    )


@pytest.mark.slow
@given(convolutions())
@settings(max_examples=20, deadline=None)
def test_forms_equal_jax_for_a_convolution_and_its_gradients(case):
    fn, image, kernel = case
    assert_forms_agree(find_convolutions(fn, make(image), make(kernel)))


@pytest.mark.parametrize(
    ("image", "kernel", "groups", "forms"),
    [
        ((2, 9, 9, 4), (3, 3, 4, 6), 1, {Form.UNCHANGED, Form.ORDERED}),
        ((2, 9, 9, 4), (3, 3, 1, 4), 4, {Form.BY_TAP, Form.BY_POSITION}),
        ((2, 9, 9, 4), (3, 3, 1, 8), 4, {Form.BY_TAP, Form.ORDERED, Form.BY_POSITION}),
        (
            (2, 9, 9, 4),
            (3, 3, 2, 6),
            2,
            {Form.UNCHANGED, Form.ORDERED, Form.BY_POSITION},
        ),
    ],
    ids=["plain", "depthwise", "multiplied", "grouped"],
)
def test_each_kind_of_convolution_has_its_forms(image, kernel, groups, forms):
    fn = convolution(feature_group_count=groups)
    assert assert_forms_agree(find_convolutions(fn, make(image), make(kernel))) == forms


@slow_after_first("groups", [1, 2, 4])
@slow_after_first(
    ("strides", "dilation", "spread"),
    [((2, 1), (1, 3), (1, 1)), ((1, 3), (2, 1), (1, 2)), ((1, 1), (2, 2), (2, 1))],
    ids=str,
)
def test_forms_heed_steps_and_padding(strides, dilation, spread, groups):
    fn = convolution(
        window_strides=strides,
        padding=((2, 0), (1, 3)),
        lhs_dilation=spread,
        rhs_dilation=dilation,
        feature_group_count=groups,
    )
    image, kernel = make((2, 9, 8, 4)), make((3, 2, 4 // groups, 8))
    forms = {1: Form.ORDERED, 2: Form.BY_POSITION, 4: Form.BY_TAP}
    used = assert_forms_agree(find_convolutions(fn, image, kernel))
    assert forms[groups] in used


def test_large_groups_in_the_batch_stay_as_jax_has_them():
    fn = convolution(batch_group_count=2)
    equation = find_convolutions(fn, make((2, 9, 9, 1)), make((3, 3, 1, 2)))[0]
    assert choose(equation) is Form.UNCHANGED
    program = jax.make_jaxpr(fn)(make((2, 9, 9, 1)), make((3, 3, 1, 2)))
    assert has_slow_loop(program, "cpu")


def test_gradients_of_single_examples_have_forms():
    fn = convolution()

    def compute(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return (fn(image[None], kernel) ** 2).sum()

    each = jax.vmap(jax.grad(compute, 1), in_axes=(0, None))
    program = jax.make_jaxpr(each)(make((4, 9, 9, 3)), make((3, 3, 3, 2)))
    equations = [
        equation
        for equation in program.eqns
        if equation.primitive is lax.conv_general_dilated_p
    ]
    assert Form.BY_POSITION in assert_forms_agree(equations)


@pytest.mark.parametrize("groups", [1, 4])
def test_short_floats_are_as_exact_as_in_jax(groups):
    dtype = jnp.bfloat16
    fn = convolution(dimension_numbers=FEATURES_FIRST, feature_group_count=groups)
    image, kernel = make((2, 4, 9, 9), dtype), make((8, 4 // groups, 3, 3), dtype)
    equations = find_convolutions(fn, image, kernel)
    assert assert_forms_agree(equations, tolerance=float(jnp.finfo(dtype).eps))


def scatter_pair(
    images: jax.Array, select: Any, window: Any, strides: Any, padding: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns JAX's gradient of max-pooling and the one of this package."""
    shape = [
        (size + low + high - length) // stride + 1
        for size, (low, high), length, stride in zip(
            images.shape, padding, window, strides, strict=True
        )
    ]
    parameters = dict(
        select_prim=select,
        window_dimensions=window,
        window_strides=strides,
        padding=padding,
    )
    return jax.jit(
        lambda source, operand: (
            lax.select_and_scatter_add_p.bind(source, operand, **parameters),
            scatter_to_winners(source, operand, **parameters),
        )
    )(make(tuple(shape), images.dtype, seed=1), images)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=15, deadline=None)
def test_pool_gradient_equals_jax(data):
    ndim = data.draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(data.draw(st.integers(low, high)) for _ in range(ndim))

    window, strides = each(1, 3), each(1, 4)
    padding = tuple(
        (data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1)))
        for n in window
    )
    images = jnp.round(make(each(3, 7)))  # Whole numbers, so that there are ties.
    select = data.draw(st.sampled_from((lax.ge_p, lax.le_p)))
    assert_close(*scatter_pair(images, select, window, strides, padding)[::-1])


def test_pool_gradient_is_equal_bit_for_bit_where_windows_do_not_overlap():
    images = make((1, 6, 7, 2)).at[0, 0, 1, 0].set(jnp.nan).at[0, 3, 3, 1].set(jnp.inf)
    images = jnp.round(images.at[0, 4:, 4:, 0].set(-jnp.inf))
    window, padding = (1, 2, 2, 1), ((0, 0), (0, 0), (0, 1), (0, 0))
    expected, actual = scatter_pair(images, lax.ge_p, window, window, padding)
    np.testing.assert_array_equal(actual, expected)
