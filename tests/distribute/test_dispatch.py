"""Tests that programs in flight are bounded, and results may be donated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from armillary.distribute import MirroredStrategy, OneDeviceStrategy
from armillary.distribute._dispatch import Dispatch


class Token:
    """Stands for the output of a program, and tells whether it was waited for."""

    def __init__(self) -> None:
        self.is_waited_for = False

    def block_until_ready(self) -> None:
        self.is_waited_for = True


@pytest.mark.parametrize(("num_devices", "most"), [(None, 2), (1, 2), (4, 1)])
def test_programs_in_flight_are_bounded(num_devices, most):
    devices = jax.devices()[:num_devices] if num_devices else None
    mesh = (
        None if devices is None else jax.sharding.Mesh(np.asarray(devices), "replica")
    )
    dispatch = Dispatch(mesh)
    tokens = [Token() for _ in range(4)]
    for started, token in enumerate(tokens):
        dispatch.wait()
        in_flight = [t for t in tokens[:started] if not t.is_waited_for]
        assert len(in_flight) == min(started, most - 1)
        dispatch.started(token)


@pytest.mark.parametrize(
    "make", [lambda: OneDeviceStrategy("cpu:0"), lambda: MirroredStrategy(["cpu:0"])]
)
def test_tracers_are_not_waited_for(make):
    strategy = make()

    def traced(x):
        strategy.dispatch.started(x)
        strategy.dispatch.wait()
        return x

    assert jax.jit(traced)(jnp.ones(())) == 1


@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_result_of_reduce_may_be_donated(num_devices):
    strategy = MirroredStrategy(jax.devices()[:num_devices])
    double = jax.jit(lambda array: 2 * array, donate_argnums=0)

    for _ in range(4):
        values = strategy.run(lambda: jnp.ones(1000))
        assert double(strategy.reduce("MEAN", values)).sum() == 2000
