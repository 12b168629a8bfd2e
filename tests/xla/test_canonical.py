"""Tests of canonical convolutions in JAX's tables: when they apply."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

from armillary.xla import _lowerings
from armillary.xla._compile import compile_step, has_slow_loop
from armillary.xla._convolutions import Form, choose_form, convolve
from armillary.xla._lowerings import Lowered, canonically, has_rules
from armillary.xla._pooling import is_supported
from tests.tiers import slow_after_first
from tests.xla.arrays import IMAGES, assert_close, make


@pytest.fixture
def restored() -> Iterator[None]:
    """Puts JAX's own rules in place, and afterwards what was there."""
    tables = mlir._platform_specific_lowerings
    saved = [(rules, dict(rules)) for rules in tables.values()]
    rules = tables["cpu"]
    for primitive in (lax.conv_general_dilated_p, lax.select_and_scatter_add_p):
        own = getattr(rules[primitive].rule, "_own", rules[primitive].rule)
        mlir.register_lowering(primitive, own, platform="cpu")
    yield
    for table, before in saved:
        table.clear()
        table.update(before)
    jax.clear_caches()


def canonical(fn: Callable[..., Any]) -> Any:
    """Returns `jax.jit(fn)`, lowered canonically."""
    assert has_rules()
    return Lowered(jax.jit(fn), canonically)


def network(kernels: tuple[jax.Array, jax.Array], images: jax.Array) -> jax.Array:
    for kernel in kernels:
        images = lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=IMAGES
        )
        images = lax.reduce_window(
            jax.nn.relu(images), -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
    return (images**2).mean()


def train(kernels: Any, images: jax.Array) -> Any:
    gradients = jax.grad(network)(kernels, images)
    return jax.tree.map(lambda old, new: old - 0.1 * new, kernels, gradients)


def train_in_scan(kernels: Any, chunk: jax.Array) -> Any:
    return lax.scan(lambda carry, x: (train(carry, x), None), kernels, chunk)[0]


def train_in_vmap(kernels: Any, chunk: jax.Array) -> Any:
    many = jax.vmap(jax.grad(network), in_axes=(None, 0))(kernels, chunk)
    return jax.tree.map(lambda all_: all_.mean(0), many)


def train_in_shard_map(kernels: Any, chunk: jax.Array) -> Any:
    mesh = jax.make_mesh(
        (2,), ("replica",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )
    split = P(None, "replica")
    return jax.shard_map(
        lambda kernels, chunk: train_in_scan_of_means(kernels, chunk),
        mesh=mesh,
        in_specs=(P(), split),
        out_specs=P(),
    )(kernels, chunk)


def train_in_scan_of_means(kernels: Any, chunk: jax.Array) -> Any:
    def mean(kernels: Any, images: jax.Array) -> jax.Array:
        return lax.pmean(network(kernels, images), "replica")

    def body(kernels: Any, images: jax.Array) -> Any:
        gradients = jax.grad(mean)(kernels, images)
        return jax.tree.map(lambda old, new: old - 0.1 * new, kernels, gradients), None

    return lax.scan(body, kernels, chunk)[0]


WAYS = [train_in_scan, train_in_vmap, train_in_shard_map]


@pytest.fixture(scope="module")
def problem() -> tuple[Any, jax.Array]:
    kernels = make((3, 3, 2, 3)) / 3, make((3, 3, 3, 4), seed=1) / 5
    return kernels, make((3, 4, 9, 10, 2), seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_training_is_equal(way, problem):
    actual, expected = canonical(way)(*problem), jax.jit(way)(*problem)
    for new, old in zip(actual, expected, strict=True):
        assert_close(new, old)


def read_orders(program: str) -> set[str]:
    return set(re.findall(r"dim_numbers = (.*?\].*?\].*?\])", program))


def test_loops_hold_ordered_convolutions_and_no_scatter(problem):
    text = canonical(train_in_scan).lower(*problem).as_text()
    assert read_orders(text) == {"[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"}
    assert "select_and_scatter" not in text


def test_programs_that_do_not_ask_hold_others(problem):
    assert has_rules()
    text = jax.jit(train_in_scan).lower(*problem).as_text()
    assert len(read_orders(text)) == 3
    assert "select_and_scatter" in text


def count_lowered(patch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list that grows with each convolution that gets another form."""
    lowered: list[Any] = []

    def record(*args: Any, **parameters: Any) -> Any:
        lowered.append(parameters["dimension_numbers"])
        return convolve(*args, **parameters)

    patch.setattr(_lowerings, "convolve", record)
    return lowered


@pytest.mark.slow
def test_a_program_is_not_confused_with_one_of_the_other_kind(
    problem, restored, monkeypatch
):
    lowered = count_lowered(monkeypatch)
    kernels, chunk = problem
    own = jax.jit(train)
    program = jax.make_jaxpr(own)(kernels, chunk[0])
    steps = compile_step(lambda *args: own(*args), program, "cpu", None)
    before = own.lower(kernels, chunk[0]).as_text()
    own(kernels, chunk[0])
    assert not lowered
    first = steps(kernels, chunk[0])
    count = len(lowered)
    assert count
    assert own.lower(kernels, chunk[0]).as_text() == before
    own(kernels, chunk[0])
    for new, old in zip(steps(kernels, chunk[0]), first, strict=True):
        np.testing.assert_array_equal(new, old)
    assert len(lowered) == count


def test_threads_lower_apart(problem, restored, monkeypatch):
    kernels, chunk = problem
    own = jax.jit(train)
    expected = own.lower(kernels, chunk[0]).as_text()
    found: list[str] = []
    inside = canonical(lambda *args: train(*args))

    def lower_meanwhile(*args: Any, **parameters: Any) -> Any:
        if not found:
            # This runs while a program of the other thread is lowered.
            with ThreadPoolExecutor(1) as pool:
                other = jax.jit(lambda *args: train(*args))
                lowered = pool.submit(lambda: other.lower(kernels, chunk[0]))
                found.append(lowered.result().as_text())
        return convolve(*args, **parameters)

    use = compile_step(train, jax.make_jaxpr(train)(kernels, chunk[0]), "cpu", None)
    assert isinstance(use, Lowered)
    monkeypatch.setattr(_lowerings, "convolve", lower_meanwhile)
    text = inside.lower(kernels, chunk[0]).as_text()
    assert "select_and_scatter" not in text
    assert read_orders(found[0]) == read_orders(expected)
    assert found[0].count("select_and_scatter") == expected.count("select_and_scatter")
    assert found[0].count("select_and_scatter") > 0


def test_complex_convolutions_are_equal():
    image, kernel = make((2, 2, 5, 5)), make((3, 2, 3, 3))
    image, kernel = image + 1j * image[::-1], kernel - 2j * kernel

    def compute(image: jax.Array, kernel: jax.Array) -> jax.Array:
        result = lax.conv_general_dilated(image, kernel, (1, 1), "SAME")
        return jnp.stack([result.real, result.imag])

    assert_close(canonical(compute)(image, kernel), jax.jit(compute)(image, kernel))


@pytest.mark.parametrize("batch", [0, 1])
def test_batches_of_none_are_compiled(batch):
    groups = 2
    kernel = make((3, 3, 2 // groups, 4))

    def compute(kernel: jax.Array, images: jax.Array) -> jax.Array:
        images = lax.conv_general_dilated(
            images,
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=IMAGES,
            feature_group_count=groups,
        )
        return lax.reduce_window(
            images, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        ).sum()

    gradient = canonical(jax.grad(compute))(kernel, make((batch, 4, 4, 2)))
    assert bool(jnp.any(gradient != 0)) == (batch > 0)


@pytest.mark.slow
def test_axes_that_the_user_shards_stay_as_they_are(problem):
    kernels, chunk = problem
    mesh = jax.make_mesh(
        (2,), ("data",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2]
    )
    with jax.set_mesh(mesh):
        images = jax.device_put(chunk[0], P("data"))
        loss = canonical(network)(jax.device_put(kernels, P()), images)
    assert_close(loss, network(kernels, chunk[0]))


def break_tables(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(mlir, "_platform_specific_lowerings")


def break_rules(patch: pytest.MonkeyPatch) -> None:
    entry = type("Entry", (), {"rule": "compiled"})()
    rules = {lax.conv_general_dilated_p: entry}
    patch.setitem(mlir._platform_specific_lowerings, "cpu", rules)


@slow_after_first("break_jax", [break_tables, break_rules])
def test_an_unknown_jax_is_left_alone(break_jax, monkeypatch, restored):
    registered: list[Any] = []
    monkeypatch.setattr(
        mlir, "register_lowering", lambda *args, **_: registered.append(args)
    )
    break_jax(monkeypatch)
    assert not has_rules()
    assert not registered
    program = jax.make_jaxpr(jax.grad(network))(
        (make((3, 3, 2, 3)),), make((1, 4, 4, 2))
    )
    assert has_slow_loop(program, "cpu")


@pytest.mark.slow
def test_operations_with_other_parameters_are_left_alone():
    program = jax.make_jaxpr(train)((make((3, 3, 2, 3)),), make((1, 4, 4, 2)))
    found = {each.primitive: each for each in program.eqns}
    equation = found[lax.conv_general_dilated_p]
    values = [each.aval for each in (*equation.invars, *equation.outvars)]
    assert choose_form(equation.params, *values) is not Form.UNCHANGED
    assert choose_form(equation.params | {"new": 1}, *values) is Form.UNCHANGED
    equation = found[lax.select_and_scatter_add_p]
    values = [each.aval for each in equation.invars]
    assert is_supported(equation.params, *values)
    assert not is_supported(equation.params | {"new": 1}, *values)
