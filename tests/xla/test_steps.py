"""Tests of the compiler's options for a step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.xla import _compile
from armillary.xla._compile import YNNPACK_FOR_SUMS, compile_step
from armillary.xla._lowerings import Lowered
from tests.releases import JAX

NAME = "xla_cpu_experimental_ynn_fusion_type"
OPTIONS = {
    "chosen": None,
    "YNNPACK for products": {NAME: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"},
    "fast math": {"xla_cpu_enable_fast_math": True},
}


class Trainer(armillary.StandardTrainer):
    def __init__(self, options, num_features=4):
        rng = np.random.default_rng(0)
        batches = rng.normal(size=(6, 32, 6, 6, num_features)).astype(np.float32)
        super().__init__(list(batches), options)
        self.conv = nnx.Conv(num_features, 8, (3, 3), rngs=nnx.Rngs(0))

    def train_step(self, iterator):
        batch = next(iterator)

        def compute_loss(conv):
            return (nnx.max_pool(nnx.relu(conv(batch)), (2, 2), (2, 2)) ** 2).mean()

        grads = nnx.grad(compute_loss)(self.conv)
        params = nnx.state(self.conv, nnx.Param)
        new = jax.tree.map(lambda old, grad: old - 0.1 * grad, params, grads)
        nnx.update(self.conv, new)

    def kernel(self):
        return np.asarray(self.conv.kernel[...])


def convolve(x):
    return jax.lax.conv(x, jnp.ones((1, 1, 3, 3)), (1, 1), "SAME")


def convolve_slowly(x):
    return jax.lax.conv_general_dilated(
        jnp.tile(x, (2, 1, 3, 3)),
        jnp.ones((2, 1, 3, 3)),
        (1, 1),
        "SAME",
        batch_group_count=2,
    )


def options_of(fn, platform="cpu", options=None, monkeypatch=None):
    """Returns what `jax.jit` gets for a step."""
    given = []
    monkeypatch.setattr(
        _compile.jax, "jit", lambda _, compiler_options: given.append(compiler_options)
    )
    program = jax.make_jaxpr(fn)(jnp.ones((1, 1, 4, 4)))
    compile_step(fn, program, platform, options)
    return given[-1]


@pytest.mark.parametrize(
    ("fn", "platform", "options", "expected"),
    [
        (convolve, "cpu", None, YNNPACK_FOR_SUMS),
        (convolve, "gpu", None, None),
        (jnp.tanh, "cpu", None, None),
        (lambda x: x @ x, "cpu", None, None),
        (convolve_slowly, "cpu", None, None),
        (convolve, "cpu", {"a": 1}, {**YNNPACK_FOR_SUMS, "a": 1}),
        (convolve, "cpu", {NAME: "b"}, {NAME: "b"}),
        (jnp.tanh, "gpu", {"a": 1}, {"a": 1}),
    ],
    ids=["convolution", "gpu", "tanh", "product", "slow", "more", "override", "given"],
)
def test_options_depend_on_the_step(fn, platform, options, expected, monkeypatch):
    assert _compile._knows(**YNNPACK_FOR_SUMS)
    assert options_of(fn, platform, options, monkeypatch) == expected


@pytest.mark.skipif(JAX < (0, 10, 2), reason="XLA leaves no sums to YNNPACK.")
def test_sums_are_left_to_ynnpack_and_convolutions_are_not():
    def fn(x):
        return jax.lax.conv(x, jnp.ones((8, 8, 3, 3)), (1, 1), "SAME"), (x * x).sum()

    x = jnp.ones((8, 8, 16, 16))
    step: Any = compile_step(fn, jax.make_jaxpr(fn)(x), "cpu", None)
    _, main = step.lower(x).compile().as_text().split("ENTRY")
    assert "__ynn_fusion" in main
    assert "convolution(" in main


def test_an_option_of_ours_that_xla_does_not_know_is_left_out(monkeypatch):
    monkeypatch.setattr(_compile, "YNNPACK_FOR_SUMS", {"no_such_option": 1})
    trainer = Trainer(armillary.StandardTrainerOptions())
    before = trainer.kernel()
    trainer.train(2)
    assert not np.array_equal(trainer.kernel(), before)


@pytest.mark.slow
def test_results_do_not_depend_on_how_steps_are_divided():
    results = []
    for steps, compile_loop in ((6, True), (1, True), (2, True), (6, False)):
        trainer = Trainer(armillary.StandardTrainerOptions(compile_loop=compile_loop))
        for _ in range(6 // steps):
            trainer.train(steps)
        results.append(trainer.kernel())
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_results_are_equal_up_to_rounding_with_other_options(options):
    expected = Trainer(armillary.StandardTrainerOptions(compile_step=False))
    expected.train(6)
    trainer = Trainer(armillary.StandardTrainerOptions(compiler_options=options))
    trainer.train(6)
    np.testing.assert_allclose(trainer.kernel(), expected.kernel(), atol=1e-5)


def test_convolutions_of_a_trainer_run_in_a_loop_without_any_setting(caplog):
    caplog.set_level("INFO", logger="armillary")
    trainer = Trainer(armillary.StandardTrainerOptions())
    trainer.train(6)
    assert "one by one" not in caplog.text
    (program,) = trainer._train_setup.loop._programs.current.values()
    assert program.is_nested
    assert isinstance(program._compiled, Lowered)


def test_a_function_takes_options_too():
    weights = nnx.Param(jnp.ones((3, 3, 1, 1)))

    def compute(x):
        return jax.lax.conv_general_dilated(
            x, weights[...], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    image = jnp.ones((1, 4, 4, 1))
    plain = armillary.function(compute)(image)
    with_options = armillary.function(compiler_options={NAME: ""})(compute)
    np.testing.assert_allclose(with_options(image), plain, atol=1e-6)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        armillary.function(compiler_options={"no_such_option": 1})(compute)(image)
