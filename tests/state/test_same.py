"""Tests of the comparison of traced programs and their constants."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from armillary.state._captured import Fingerprint


def trace(fn: Callable[[Any], Any]) -> Any:
    return Fingerprint(jax.jit(lambda x: fn(x)).trace(jnp.ones(3)).jaxpr)


def nested(values: Any) -> Callable[[Any], Any]:
    return jax.jit(lambda x: x * jnp.asarray(values))


def scanned(values: Any) -> Callable[[Any], Any]:
    array = np.asarray(values, np.float32)
    return lambda x: jax.lax.scan(lambda c, _: (c * array, None), x, length=2)[0]


def called_back(values: Any) -> Callable[[Any], Any]:
    def host(x: Any) -> Any:
        return np.asarray(x) * np.asarray(values, np.float32)

    return lambda x: jax.pure_callback(host, jax.typeof(x), x)


def printed(values: Any) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        jax.debug.print(f"{values} " + "{}", x)
        return jax.nn.relu(x)

    return step


@pytest.mark.parametrize("make", [nested, scanned, called_back, printed])
def test_programs_are_compared_down_to_the_constants_of_what_they_call(make):
    one, same, other = (trace(make(v)) for v in ((1, 2, 3), (1, 2, 3), (1, 2, 4)))
    assert one.is_same(same)
    assert not one.is_same(other)


def test_keys_are_compared_by_their_data():
    def make(seed: int) -> Any:
        key = jax.random.key(seed)
        return trace(lambda x: x + jax.random.uniform(key, (3,)))

    assert make(0).is_same(make(0))
    assert not make(0).is_same(make(1))


def test_a_callback_that_leads_to_other_objects_is_another():
    class Log:
        def write(self, x: Any) -> None:
            del x

    def make(log: Log) -> Any:
        return trace(lambda x: (jax.debug.callback(log.write, x), x)[1])

    log = Log()
    assert make(log).is_same(make(log))
    assert not make(log).is_same(make(Log()))


def test_a_numpy_array_that_was_written_to_since_is_another():
    table = np.ones(3, np.float32)
    before = trace(lambda x: x * table)
    table[0] = 2
    assert not before.is_same(trace(lambda x: x * table))
