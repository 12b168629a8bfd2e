"""Behavior of JAX that strategies rely on; a release that changes it fails here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

COUNT = 4
AXIS = "replica"
# The values of each replica, and its cotangents.
HELD = np.arange(COUNT * COUNT, dtype=np.float32).reshape(COUNT, COUNT)
GIVEN = HELD[::-1] ** 2 + 1


def on_replicas(fn, *rows):
    """Maps a function of one replica's rows over 4 devices, as `Strategy.run` does."""
    devices = np.asarray(jax.devices()[:COUNT])
    mapped = jax.shard_map(
        lambda *rows: jax.tree.map(lambda x: x[None], fn(*(row[0] for row in rows))),
        mesh=Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,)),
        in_specs=PartitionSpec(AXIS),
        out_specs=PartitionSpec(AXIS),
        check_vma=False,
    )
    return jax.tree.map(np.asarray, jax.jit(mapped)(*rows))


SHIFT = [(i, (i + 1) % COUNT) for i in range(COUNT)]
BACK = [(j, i) for i, j in SHIFT]
SPLIT = {"split_axis": 0, "concat_axis": 0}
# Each transpose is the transpose of one linear map of all values of all replicas.
TRANSPOSES = {
    "psum": (
        lambda x: jax.lax.psum(x, AXIS),
        lambda g: jax.lax.psum(g, AXIS),
    ),
    "pmean": (
        lambda x: jax.lax.pmean(x, AXIS),
        lambda g: jax.lax.psum(g, AXIS) / COUNT,
    ),
    "all_gather": (
        lambda x: jax.lax.all_gather(x[:1], AXIS, tiled=True),
        lambda g: (
            jnp.zeros(COUNT).at[:1].set(jax.lax.psum_scatter(g, AXIS, tiled=True))
        ),
    ),
    "psum_scatter": (
        lambda x: jnp.tile(jax.lax.psum_scatter(x, AXIS, tiled=True), COUNT),
        lambda g: jax.lax.all_gather(jnp.sum(g)[None], AXIS, tiled=True),
    ),
    "ppermute": (
        lambda x: jax.lax.ppermute(x, AXIS, SHIFT),
        lambda g: jax.lax.ppermute(g, AXIS, BACK),
    ),
    "all_to_all": (
        lambda x: jax.lax.all_to_all(x, AXIS, tiled=True, **SPLIT),
        lambda g: jax.lax.all_to_all(g, AXIS, tiled=True, **SPLIT),
    ),
}


@pytest.mark.parametrize("name", TRANSPOSES)
def test_a_collective_transposes_to_its_own_transpose(name):
    collective, transposed = TRANSPOSES[name]

    def pull(held, given):
        _, pullback = jax.vjp(collective, held)
        return pullback(given)[0], transposed(given)

    actual, expected = on_replicas(pull, HELD, GIVEN)
    np.testing.assert_allclose(actual, expected)
    # All collectives together are a matrix, whose transpose has the same products.
    made = on_replicas(collective, HELD)
    np.testing.assert_allclose((made * GIVEN).sum(), (HELD * actual).sum(), 1e-6)


@pytest.mark.parametrize("collective", [jax.lax.pmax, jax.lax.pmin])
def test_a_maximum_over_replicas_has_no_derivative(collective):
    with pytest.raises(NotImplementedError, match="not implemented"):
        on_replicas(jax.grad(lambda x: jnp.sum(collective(x, AXIS))), HELD)


@pytest.mark.parametrize(
    ("reduce_loss", "times"),
    [
        (lambda loss: loss, 1),
        (lambda loss: jax.lax.pmean(loss, AXIS), 1),
        (lambda loss: jax.lax.psum(loss, AXIS), COUNT),
    ],
    ids=["as it is", "pmean", "psum"],
)
def test_a_gradient_is_of_the_sum_of_all_losses_by_the_own_copy(reduce_loss, times):
    actual = on_replicas(
        jax.grad(lambda w, x: reduce_loss(jnp.sum(w**2 * x))), GIVEN, HELD
    )
    np.testing.assert_allclose(actual, times * 2 * GIVEN * HELD, 1e-6)


def test_a_donated_buffer_is_deleted():
    array = jnp.ones(4) + 0
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted()
