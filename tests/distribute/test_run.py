"""Tests of `run`: tracing, binding and calling, on several replicas and eagerly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.errors import (
    BatchSizeError,
    ReplicaContextError,
    ReplicaMismatchError,
)
from tests.problems import Holder

ONE = {
    "default": armillary.distribute.DefaultStrategy,
    "one device": lambda: armillary.OneDeviceStrategy("cpu:0"),
    "sharded": lambda: armillary.ShardedStrategy(devices=jax.devices()[:2]),
}
REDUCED = {
    "as it is": lambda v: armillary.all_reduce("sum", v),
    "jit": jax.jit(lambda v: armillary.all_reduce("sum", v)),
    "checkpoint": jax.checkpoint(lambda v: armillary.all_reduce("sum", v)),
    "mean": jax.jit(lambda v: 2 * armillary.all_reduce("mean", v)),
}


@pytest.mark.parametrize("name", REDUCED)
def test_a_traced_function_receives_the_replicas_with_data(
    name, make_mirrored, put_rows
):
    strategy = make_mirrored(4)
    for count in (4, 2):
        rows = put_rows(strategy, [1.0, 2.0, 50.0, 50.0], num_active=count)
        total = strategy.run(lambda x: REDUCED[name](x), args=(rows,))
    assert float(total.array) == 3


def test_a_reference_differs_if_the_loop_that_writes_it_has_another_length(
    make_mirrored,
):
    strategy, held = make_mirrored(2), Holder(total=jnp.zeros(()))

    def step_fn():
        ref = jax.new_ref(jnp.zeros(()))

        def body(i):
            ref[...] = ref[...] + 1
            return i + 1

        jax.lax.while_loop(lambda i: i < jax.lax.axis_index("replica"), body, 0)
        held.total = ref[...]

    with pytest.raises(ReplicaMismatchError, match="held/total"):
        strategy.run(step_fn)


def test_a_solver_of_equal_values_is_equal(make_mirrored, put_rows):
    strategy = make_mirrored(2)
    rows = put_rows(strategy, [[1.0, 2.0], [3.0, 4.0]])

    def step_fn(x):
        scale = armillary.all_reduce("mean", x)
        solved, _ = jax.scipy.sparse.linalg.cg(lambda v: scale * v, jnp.ones(2))
        return solved

    found = strategy.run(step_fn, args=(rows,))
    assert found.is_shared
    np.testing.assert_allclose(found.array, [1 / 2, 1 / 3], rtol=1e-5)


def test_a_mean_for_a_log_does_not_warn_about_the_scale_of_a_sum(make_mirrored):
    strategy = make_mirrored(4)
    options = armillary.data.InputOptions(remainder="exact")
    (batch,) = strategy.distribute_dataset([np.ones(6, np.float32)], options)

    def step_fn(x):
        losses, grads = jax.value_and_grad(lambda w: jnp.mean(x * w) / 4)(1.0)
        armillary.all_reduce("mean", losses)
        return armillary.all_reduce("sum", grads)

    with pytest.raises(BatchSizeError, match="it sums gradients of a loss"):
        strategy.run(step_fn, args=(batch,))


@pytest.mark.parametrize("strategy", ["default", "one device"])
def test_an_eager_run_gives_values_of_its_own_derivatives(strategy):
    found = ONE[strategy]().run(jax.nn.relu, (jnp.asarray([-1.0, 2.0]),))
    assert np.asarray(found).tolist() == [0, 2]


def test_an_eager_run_may_ask_for_its_number_and_make_modules():
    made = ONE["default"]().run(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    made.bias[...] = made.bias[...] + 1
    number = ONE["default"]().run(lambda: jax.lax.axis_index("replica") + 1)
    assert int(number) == 1


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy, step_fn):
        rows = armillary.data.from_arrays(np.ones((4, 2), "f"), batch_size=2)
        super().__init__(strategy.distribute_dataset(rows))
        self.strategy, self.step_fn = strategy, step_fn
        self.model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def train_step(self, iterator):
        self.step_fn(self, next(iterator))


@pytest.mark.parametrize("strategy", ONE)
def test_a_module_that_run_returns_is_the_module(strategy):
    def step_fn(trainer, batch):
        model = trainer.strategy.run(lambda x: trainer.model, args=(batch,))
        model.kernel[...] = jnp.zeros_like(model.kernel[...])

    trainer = Trainer(ONE[strategy](), step_fn)
    trainer.train(1)
    assert not trainer.model.kernel[...].any()


def test_operations_that_jax_lacks_with_one_replica_are_refused():
    def step_fn(trainer, batch):
        exchange = jax.lax.all_to_all
        trainer.strategy.run(
            lambda x: exchange(x, "replica", 0, 0, tiled=True), (batch,)
        )

    with pytest.raises(ReplicaContextError, match=r"`all_to_all` at .*test_run.py"):
        Trainer(ONE["one device"](), step_fn).train(1)


def test_a_traced_function_accumulates():
    weight = nnx.Param(jnp.asarray(2.0))

    @jax.jit
    def average(batch, value):
        return armillary.compute_average_loss(batch * value)

    for count in (1, 2, 4):
        loss, _ = armillary.value_and_grad(
            lambda batch: average(batch, weight[...]),
            [weight],
            batch=jnp.arange(8.0),
            accumulate_steps=count,
        )
        assert float(loss) == 7
