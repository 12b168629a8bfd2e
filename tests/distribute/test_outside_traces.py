"""Tests that no traced value is left behind, and `jit` around `run` is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.errors import CapturedStateError, ReplicaContextError
from tests.problems import make_strategy

history = []
last = {}


class Trainer(armillary.StandardTrainer):
    def __init__(self):
        super().__init__([np.ones((4, 2), np.float32)] * 4)
        self.strategy, self.total = make_strategy(2), jnp.zeros(())

    def train_step(self, iterator):
        self.strategy.run(self.leave, args=(next(iterator),))
        self.total = self.total + 1


class InList(Trainer):
    def leave(self, x):
        history.append(x.sum())


class InDict(Trainer):
    def leave(self, x):
        last["loss"] = x.sum()


class Shape(Trainer):
    def leave(self, x):
        history.append(x.shape)


@pytest.mark.parametrize(("kind", "name"), [(InList, "history"), (InDict, "last")])
def test_an_array_left_in_a_global_is_an_error(kind, name):
    with pytest.raises(
        CapturedStateError,
        match=rf"`train_step` put an array into `{name}`, which the trainer does not "
        r"carry from step to step, .* Hold the value in an array or a metric of the "
        r"trainer.*"
        r"`jax.debug.print`\.",
    ):
        kind().train(2)
    assert all(value is None for value in [*history, *last.values()])
    history.clear()


def test_values_that_are_no_arrays_may_be_left():
    Shape().train(2)
    assert set(history) == {(2, 2)}
    history.clear()


def make_step(strategy=None):
    strategy = strategy or make_strategy(2)
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step_fn(x):
        gradients = armillary.all_reduce(
            "sum", nnx.grad(lambda model: nnx.jit(model)(x).sum())(model)
        )
        optimizer.update(model, gradients)

    def step(x):
        strategy.run(step_fn, args=(x,))

    return model, step


@pytest.mark.slow
@pytest.mark.parametrize("transform", [jax.jit, nnx.jit])
@pytest.mark.parametrize("is_warm", [False, True])
def test_jit_around_run_is_an_error_before_anything_is_written(transform, is_warm):
    model, step = make_step()
    x = jnp.ones((4, 2))
    if is_warm:
        step(x)
    before = np.array(model.kernel[...])

    with pytest.raises(
        ReplicaContextError,
        match=r"(?s)`step_fn` reads or writes variables \(model/bias, model/k.*\), "
        r"and was called inside `jax.jit`, `nnx.jit` or another transformation of JAX.*"
        "Decorate the function that calls `strategy.run` with `@armillary.function`",
    ):
        transform(step)(x)
    np.testing.assert_array_equal(model.kernel[...], before)

    armillary.function(step)(x)
    assert (np.array(model.kernel[...]) != before).all()


def test_run_without_variables_works_under_jit():
    strategy = make_strategy(2)

    @jax.jit
    def double(x):
        return strategy.gather(strategy.run(lambda x: 2 * x[None], args=(x,)), axis=0)

    np.testing.assert_array_equal(double(jnp.ones(())), [2, 2])


@pytest.mark.parametrize("transform", [jax.jit, nnx.jit])
def test_run_inside_a_transformation_of_a_step_is_refused(transform):
    strategy = make_strategy(2)

    class Wrapped(armillary.StandardTrainer):
        def __init__(self):
            super().__init__(strategy.distribute_dataset([np.ones(4, np.float32)] * 2))
            self.weight = jnp.zeros(())

        def train_step(self, iterator):
            def step_fn(batch):
                self.weight = self.weight + 1

            transform(lambda batch: strategy.run(step_fn, args=(batch,)))(
                next(iterator)
            )

    trainer = Wrapped()
    with strategy.scope(), pytest.raises(ReplicaContextError) as caught:
        trainer.train(1)
    assert "`strategy.run` of `step_fn` was called inside `jax.jit`" in str(
        caught.value
    )
    assert "changes state of the step (weight)" in str(caught.value)
    assert float(trainer.weight) == 0
