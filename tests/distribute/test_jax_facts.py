"""Behavior of JAX that strategies rely on; a release that changes it fails here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, PartitionSpec

from armillary._jaxpr import Dataflow, programs_in

COUNT = 4
AXIS = "replica"
# What each replica holds, and what it gives as cotangent.
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
# The transpose of each is that of the whole as one linear map of all that is held.
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


def in_scan(fn):
    def call(w, x):
        return jax.lax.scan(lambda c, _: (c + fn(w, x), None), 0.0, length=2)[0]

    return call


def with_own_backward(fn):
    @jax.custom_vjp
    def call(w, x):
        return fn(w, x)

    call.defvjp(lambda w, x: jax.vjp(fn, w, x), lambda pullback, g: pullback(g))
    return call


AROUND = {
    "nothing": lambda fn: fn,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "checkpoint, saving products": lambda fn: jax.checkpoint(
        fn, policy=jax.checkpoint_policies.dots_saveable
    ),
    "scan": in_scan,
    "custom_vjp": with_own_backward,
    "checkpoint in a scan": lambda fn: in_scan(jax.checkpoint(fn)),
    "scan in a checkpoint": lambda fn: jax.checkpoint(in_scan(fn)),
    "jit in a checkpoint": lambda fn: jax.checkpoint(jax.jit(fn)),
}


def trace_gradient(around, loss_fn):
    gradient = jax.grad(AROUND[around](loss_fn))
    return jax.make_jaxpr(gradient, axis_env=[(AXIS, COUNT)])(jnp.ones(3), jnp.ones(3))


class Named(Dataflow[bool]):
    """Follows what has a name."""

    nothing = False

    def join(self, facts):
        return any(facts)

    def transfer(self, equation, operands):
        return [True] if equation.primitive.name == "name" else None


@pytest.mark.parametrize("around", AROUND)
def test_a_name_of_the_divisor_stands_in_every_gradient(around):
    def loss_fn(w, x):
        return jnp.sum(jnp.sin(w * x)) / checkpoint_name(jnp.float32(4), "divisor")

    assert Named().run(trace_gradient(around, loss_fn), [False, False]) == [True]


@pytest.mark.parametrize("around", AROUND)
def test_a_name_of_the_loss_does_not(around):
    def loss_fn(w, x):
        return checkpoint_name(jnp.sum(jnp.sin(w * x)), "loss")

    assert Named().run(trace_gradient(around, loss_fn), [False, False]) == [False]


def sums(program, within=()):
    """Yields for each sum over replicas the name stacks around it, from outside."""
    for equation in getattr(program, "jaxpr", program).eqns:
        stacks = (*within, str(equation.source_info.name_stack))
        if equation.primitive.name.startswith("psum"):
            yield stacks
        for inner in programs_in(equation):
            yield from sums(inner, stacks)


@pytest.mark.parametrize("around", AROUND)
def test_name_stacks_tell_transposed_sums_from_those_of_the_loss(around):
    def loss_fn(w, x):
        return jnp.sin(jax.lax.psum(jnp.sum(jnp.sin(w * x)), AXIS))

    kinds = [kind_of(stacks) for stacks in sums(trace_gradient(around, loss_fn))]
    again = ["again"] if "checkpoint" in around else []
    assert sorted(kinds) == [*again, "backward", "forward"]


def kind_of(stacks):
    """Returns what the innermost name stack says that says anything."""
    for stack in reversed(stacks):
        # What `jax.checkpoint` computes once more stands within the backward pass.
        if "rematted_computation" in stack:
            return "again"
        if "transpose(" in stack:
            return "backward"
    return "forward"


def test_a_donated_buffer_is_deleted():
    array = jnp.ones(4) + 0
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted()


def test_a_sum_with_a_python_float_keeps_a_weak_type():
    assert jnp.asarray(0.0).weak_type
    assert not jnp.zeros(()).weak_type
    assert (jnp.asarray(0) * 1.0).dtype == jnp.float32
