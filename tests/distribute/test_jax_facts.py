"""Behavior of JAX that strategies rely on; a release that changes it fails here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec


@pytest.fixture
def replicate():
    """Maps a function of one replica's rows over 4 devices."""
    mesh = Mesh(
        np.asarray(jax.devices()[:4]), ("replica",), axis_types=(AxisType.Auto,)
    )
    split = PartitionSpec("replica")

    def replicate(fn, *shared):
        rows = jnp.arange(4.0)
        mapped = jax.shard_map(
            lambda rows, *shared: fn(rows[0], *shared)[None],
            mesh=mesh,
            in_specs=(split, *[PartitionSpec()] * len(shared)),
            out_specs=split,
        )
        with jax.auto_pcast(True):
            return np.asarray(jax.jit(mapped)(rows, *shared))

    return replicate


def test_types_tell_what_varies(replicate):
    seen = []

    def fn(row, shared):
        for value in (row, shared, row * shared):
            kind = jax.typeof(value)
            seen.append(getattr(kind, "manual_axis_type", kind).varying)
        return row

    replicate(fn, jnp.float32(2))
    assert seen == [{"replica"}, frozenset(), {"replica"}]


def test_nothing_varies_outside():
    kind = jax.typeof(jnp.ones(2))
    assert not getattr(kind, "manual_axis_type", kind).varying


@pytest.mark.parametrize(
    ("reduce_fn", "expected"),
    [
        (lambda grad: grad, 3.5 * 4),
        (lambda grad: jax.lax.pmean(grad, "replica"), 14),
        (lambda grad: jax.lax.psum(grad, "replica"), 56),
    ],
    ids=["as it is", "pmean", "psum"],
)
def test_a_gradient_is_summed_already(replicate, reduce_fn, expected):
    # The mean of the four local gradients, 2 * row + 0.5, is 3.5.
    def fn(row, weight):
        grad = jax.grad(lambda weight: weight * (2 * row + 0.5))(weight)
        return reduce_fn(grad) + 0 * row

    np.testing.assert_array_equal(replicate(fn, jnp.float32(1)), [expected] * 4)


def test_a_gradient_with_respect_to_local_values_is_not_summed(replicate):
    def fn(row, weight):
        return jax.grad(lambda row: weight * row)(row)

    np.testing.assert_array_equal(replicate(fn, jnp.float32(3)), [3] * 4)


def test_automatic_casts_can_be_switched_on():
    before = jax.config.jax_auto_pcast
    with jax.auto_pcast(True):
        assert jax.config.jax_auto_pcast is True
    assert jax.config.jax_auto_pcast is before


def test_a_scan_does_not_cast_its_carry(replicate):
    def fn(row):
        return jax.lax.scan(lambda c, _: (c + row, None), jnp.zeros(()), length=2)[0]

    with pytest.raises(TypeError, match="manual axis types do not match"):
        replicate(fn)


def test_a_while_loop_does_not_cast_its_carry(replicate):
    def fn(row):
        return jax.lax.while_loop(
            lambda c: c < 5.0, lambda c: c + row + 1, jnp.zeros(())
        )

    with pytest.raises(TypeError, match="manual axis types do not match"):
        replicate(fn)


def test_a_shared_value_that_is_summed_is_cast_first(replicate):
    def fn(row, shared):
        return jax.lax.psum(shared, "replica") + 0 * row

    program = str(jax.make_jaxpr(lambda x: replicate_program(fn)(x, x[0]))(jnp.ones(4)))
    assert "pvary" in program and "psum" in program


def replicate_program(fn):
    mesh = Mesh(
        np.asarray(jax.devices()[:4]), ("replica",), axis_types=(AxisType.Auto,)
    )

    def call(rows, shared):
        with jax.auto_pcast(True):
            return jax.shard_map(
                lambda rows, shared: fn(rows[0], shared)[None],
                mesh=mesh,
                in_specs=(PartitionSpec("replica"), PartitionSpec()),
                out_specs=PartitionSpec("replica"),
            )(rows, shared)

    return call


def test_a_donated_buffer_is_deleted():
    array = jnp.ones(4) + 0
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted()


def test_a_sum_with_a_python_float_keeps_a_weak_type():
    assert jnp.asarray(0.0).weak_type
    assert not jnp.zeros(()).weak_type
    assert (jnp.asarray(0) * 1.0).dtype == jnp.float32
