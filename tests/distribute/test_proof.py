"""Tests of the proof that mirrored state stays equal on all replicas."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from armillary.distribute.analysis._labels import BATCH, EQUAL, LabelKind
from armillary.distribute.analysis._proof import Proof
from armillary.errors import ReplicaMismatchError


@pytest.fixture
def find(make_mirrored):
    """Returns what differs in a function of a replica's value and a shared one."""

    def find(fn):
        found = []

        def replica_fn(x, w):
            program = jax.make_jaxpr(fn)(x, w)
            found.append(Proof(program, [BATCH, EQUAL], [2], "replica"))
            return x

        mapped = jax.shard_map(
            replica_fn,
            mesh=make_mirrored(2).mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        jax.make_jaxpr(mapped)(jnp.ones(3), jnp.ones(3))
        return found[0]

    return find


EQUALS = {
    "shared": lambda x, w: w * 2,
    "reduced": lambda x, w: jax.lax.psum(x, "replica"),
    "broadcast": lambda x, w: jax.lax.pbroadcast(x, ("replica",), 0),
    "gathered": lambda x, w: jax.lax.all_gather(x, "replica").sum(0),
    "cast": lambda x, w: w.astype(jnp.bfloat16),
    "loop": lambda x, w: jax.lax.fori_loop(0, 3, lambda i, c: c + w, w),
    "loop of reductions": lambda x, w: jax.lax.fori_loop(
        0, 3, lambda i, c: jax.lax.pmean(c * x, "replica"), w
    ),
    "branch": lambda x, w: jax.lax.cond(w[0] > 0, lambda: w, lambda: -w),
    "reference": lambda x, w: through_reference(w),
}
DIFFERENT = {
    "local": (lambda x, w: x + w, "one replica's share of the batch"),
    "number": (lambda x, w: w * jax.lax.axis_index("replica"), "the number of"),
    "exchanged": (lambda x, w: jax.lax.ppermute(x, "replica", [(0, 1)]), "number"),
    "late in a loop": (
        lambda x, w: jax.lax.fori_loop(0, 3, lambda i, c: (c[1], c[2], x), (w, w, w))[
            0
        ],
        "share of the batch",
    ),
    "nested call": (jax.jit(lambda x, w: jnp.where(x > 0, w, 0)), "share"),
    "solved": (
        lambda x, w: jax.lax.custom_linear_solve(
            lambda v: v * x, w, lambda mv, b: b / x
        ),
        "share of the batch",
    ),
    "reference": (lambda x, w: through_reference(x), "share of the batch"),
}


def through_reference(value):
    ref = jax.new_ref(value)
    ref[...] = value + 1
    return ref[...]


@pytest.mark.parametrize("name", EQUALS)
def test_values_that_are_equal(name, find):
    assert not find(EQUALS[name]).results[0].reasons


@pytest.mark.parametrize("name", DIFFERENT)
def test_values_that_differ_and_the_reason(name, find):
    fn, reason = DIFFERENT[name]
    assert reason in " ".join(find(fn).results[0].reasons)


def test_a_gradient_of_one_replica_has_its_line(find):
    found = find(lambda x, w: jax.jit(jax.grad(lambda w: jnp.sum(x * w) ** 2))(w))
    assert "test_proof.py" in found.results[0].find(LabelKind.GRADIENT)


def test_a_condition_that_reduces_is_a_conflict_too(find):
    def fn(x, w):
        return jax.lax.while_loop(
            lambda v: (v[0] < 3) & (jax.lax.psum(v, "replica")[0] < 9),
            lambda v: v + 1,
            x,
        )

    with pytest.raises(ReplicaMismatchError, match=r"`while` at .*test_proof\.py"):
        find(fn)


def test_a_loop_that_all_leave_together_may_reduce(find):
    def fn(x, w):
        return jax.lax.while_loop(
            lambda v: jax.lax.psum(v, "replica")[0] < 9, lambda v: v + 1, x
        )

    find(fn)
