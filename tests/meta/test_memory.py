"""Tests of how a process of the tests frees its compiled programs."""

import sys

import jax
import jax.numpy as jnp
import pytest

from tests.memory import free_programs, measure_resident_bytes


def test_programs_are_forgotten_and_compiled_again():
    double = jax.jit(lambda x: 2 * x)
    assert double(jnp.asarray(3)) == 6
    assert double._cache_size() == 1

    free_programs()

    assert double._cache_size() == 0
    assert double(jnp.asarray(3)) == 6


@pytest.mark.skipif(sys.platform != "linux", reason="Only Linux has `/proc`.")
def test_the_memory_of_a_process_is_measured():
    before = measure_resident_bytes()
    block = bytearray(b"1" * 50_000_000)

    assert measure_resident_bytes() - before > 0.8 * len(block)
