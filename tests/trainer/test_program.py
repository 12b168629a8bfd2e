"""Tests of the choice between a loop on the device and one in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.xla._compile import has_slow_loop
from tests.problems import make_strategy


def convolve(x):
    return jax.lax.conv(x, jnp.ones((1, 1, 3, 3)), (1, 1), "SAME")


def slow(x):
    axes = ("NHWC", "HWIO", "NHWC")
    image, window = jnp.tile(x, (2, 9, 9, 1)), jnp.ones((3, 3, x.shape[-1], 2))
    return jax.lax.conv_general_dilated(
        image, window, (1, 1), "SAME", None, None, axes, batch_group_count=2
    )


def convolve_in_order(x):
    axes = ("NHWC", "HWIO", "NHWC")
    window = jnp.ones((3, 3, x.shape[-1], 1))
    return jax.lax.conv_general_dilated(x, window, (1, 1), "SAME", None, None, axes)


@pytest.mark.parametrize(
    ("fn", "platform", "expected"),
    [
        (convolve, "cpu", False),
        (slow, "cpu", True),
        (slow, "gpu", False),
        (jax.jit(slow), "cpu", True),
        (
            lambda x: jax.lax.fori_loop(0, 2, lambda _, y: y + slow(x).sum(), x),
            "cpu",
            True,
        ),
        (lambda x: jnp.tanh(x) @ x[0, 0], "cpu", False),
        (convolve_in_order, "cpu", False),
        (jax.grad(lambda x: jnp.tanh(convolve_in_order(x)).sum()), "cpu", False),
    ],
    ids=[
        "plain",
        "in groups of images",
        "gpu",
        "nested",
        "loop",
        "without",
        "in order",
        "gradient",
    ],
)
def test_few_convolutions_on_a_cpu_are_slow_in_loops(fn, platform, expected):
    program = jax.make_jaxpr(fn)(jnp.ones((1, 1, 4, 4)))

    assert has_slow_loop(program, platform) is expected


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy):
        options = armillary.StandardTrainerOptions(steps_per_chunk=3)
        super().__init__([np.ones((4, 2), np.float32)] * 20, options)
        self.strategy, self.count = strategy, jnp.zeros(())
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def train_step(self, iterator):
        def step_fn(batch):
            self.dropout(batch)
            self.count = self.count + 1

        self.strategy.run(step_fn, args=(next(iterator),))


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [None, 2])
@pytest.mark.parametrize(
    "option", ["jax_disable_jit", "jax_check_tracer_leaks", "jax_debug_key_reuse"]
)
def test_a_step_runs_under_what_jax_has_for_debugging(option, num_replicas):
    strategy = (
        make_strategy(num_replicas) if num_replicas else armillary.DefaultStrategy()
    )
    jax.config.update(option, True)
    try:
        trainer = Trainer(strategy)
        trainer.train(2)
        trainer.train(1)
    finally:
        jax.config.update(option, False)
    assert int(trainer.count) == 3
