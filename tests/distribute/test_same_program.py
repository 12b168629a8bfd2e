"""Tests that processes with different programs or constants get an error."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.distribute.program._compare import check_same_program
from armillary.errors import PeerError
from tests.peers import run_together

DTYPES = ["bool", "int4", "int8", "uint32", "bfloat16", "float16", "float32"]
NESTS = {
    "plain": lambda fn: fn,
    "compiled": jax.jit,
    "looped": lambda fn: lambda x: jax.lax.fori_loop(0, 2, lambda _, y: fn(y), x),
    "chosen": lambda fn: lambda x: jax.lax.cond(x > 0, fn, lambda y: y, x),
}


def compare(make_fn, **arguments):
    """Compares what `make_fn` returns in each process, on a number."""

    def run(peers):
        fn = make_fn(peers.index)
        program = jax.make_jaxpr(fn)(1.0)
        given = {name: value(peers.index) for name, value in arguments.items()}
        return check_same_program(peers, "step", program, fn, given)

    return run_together(run)


def test_programs_are_compared_without_addresses():
    def call(x):
        return jax.pure_callback(lambda y: y, x, x)

    # The callback is another object in each trace.
    assert compare(lambda index: call) == [None, None]
    chain = 2 * [jax.lax.sin, jax.lax.cos, jax.lax.tan, jax.lax.exp]

    def make(index):
        def fn(x):
            for part in chain[: 8 - 2 * index]:
                x = part(x)
            return x

        return fn

    for outcome in compare(make):
        with pytest.raises(PeerError, match="different programs") as e:
            raise outcome
        line = r"  line 8: process 0 has .*= tan .*, process 1 has in"
        assert re.search(line, str(e.value))


@pytest.mark.slow
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 3), max_size=3),
    nest=st.sampled_from(sorted(NESTS)),
    is_numpy=st.booleans(),
    data=st.data(),
)
@settings(deadline=None)
def test_one_other_element_of_a_constant_is_found_wherever_it_is(
    dtype, shape, nest, is_numpy, data
):
    equal, other = np.zeros(shape, dtype), np.zeros(shape, dtype)
    other.reshape(-1)[data.draw(st.integers(0, other.size - 1))] = 1
    make = np.array if is_numpy else jnp.array

    def make_fn(values):
        constant = make(values)

        def fn(x):
            return NESTS[nest](
                lambda y: y + jnp.asarray(constant).astype(y.dtype).sum()
            )(x)

        return fn

    assert compare(lambda index: make_fn(equal)) == [None, None]
    for outcome in compare(lambda index: make_fn([equal, other][index])):
        with pytest.raises(PeerError):
            raise outcome


def test_a_constant_is_called_by_its_name():
    def make(index):
        table, key = jnp.full((2, 3), index), jax.random.key(index)
        same = jnp.ones(2)

        def fn(x):
            return same.sum() * jax.jit(lambda y: y * table)(x), key

        return fn

    for outcome in compare(make):
        with pytest.raises(PeerError, match="`step` computes with diff") as e:
            raise outcome
        values = r"process 0 has int32 \(2, 3\) #\w+, process 1 has int32 \(2, 3\) #\w+"
        assert re.search(rf"^  `table` .*: {values}$", str(e.value), re.MULTILINE)
        assert re.search(r"\n  `key` .*: process 0 has uint32 \(2,\) #", str(e.value))
        assert "`same`" not in str(e.value)
        assert "from one seed and the same data in all processes" in str(e.value)


def test_arguments_of_the_first_call_are_compared():
    for outcome in compare(lambda index: jnp.sin, x=np.float32):
        with pytest.raises(PeerError, match=r"  `x`: process 0 has float32 \(\) #"):
            raise outcome
