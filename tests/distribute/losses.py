"""Data, losses and wrappers of JAX for tests of losses on several replicas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import armillary

ROWS, WIDTH = 24, 6
_numbers = np.random.default_rng(0)
_x = _numbers.normal(size=(ROWS, WIDTH))
DATA = {
    "x": _x,
    "y": _x @ _numbers.normal(size=WIDTH) + 1,
    "mask": (_numbers.uniform(size=ROWS) > 0.4).astype(float),
    "tokens": (_numbers.uniform(size=(ROWS, 3)) > 0.4).astype(float),
}
W = np.linspace(0.5, 1.5, WIDTH)


def squares(w, b):
    """Returns the loss of each example."""
    return (b["x"] @ w - b["y"]) ** 2


def mean(w, b):
    return jnp.mean(squares(w, b))


def average(w, b):
    return armillary.compute_average_loss(squares(w, b))


def on_replicas(strategy, step_fn, data: Any = None):
    """Returns what a step makes of weights and a share; it is equal on all replicas."""
    options = armillary.data.InputOptions(remainder="exact")
    (batch,) = strategy.distribute_dataset([DATA if data is None else data], options)
    result = strategy.run(step_fn, args=(jnp.asarray(W), batch))
    first, *others = strategy.local_results(result)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)
    return first


def check(actual, expected, tolerance=1e-9):
    """Asserts that two pytrees are equal up to rounding."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, tolerance, 1e-12),
        actual,
        expected,
    )


def in_scan(fn):
    """Adds up what a function returns, in a loop of one step."""

    def call(*args):
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(fn, *args))

        def body(carry, _):
            return jax.tree.map(jnp.add, carry, fn(*args)), None

        return jax.lax.scan(body, zeros, length=1)[0]

    return call


def in_cond(fn):
    """Calls a function in a branch that all replicas take."""

    def call(w, *args):
        is_true = jnp.sum(w) > -100
        return jax.lax.cond(is_true, fn, lambda *args: fn(*args), w, *args)

    return call


def with_own_backward(fn):
    """Gives a function its derivative by hand."""

    @jax.custom_vjp
    def call(*args):
        return fn(*args)

    call.defvjp(lambda *args: jax.vjp(fn, *args), lambda pullback, g: pullback(g))
    return call


AROUND = {
    "nothing": lambda fn: fn,
    "jit": jax.jit,
    "jit of a named call": lambda fn: jax.jit(jax.named_call(fn, name="inner")),
    "scan": in_scan,
    "cond": in_cond,
    "custom_vjp": with_own_backward,
    "checkpoint": jax.checkpoint,
    "checkpoint in a scan": lambda fn: in_scan(jax.checkpoint(fn)),
    "jit in a checkpoint": lambda fn: jax.checkpoint(jax.jit(fn)),
}
