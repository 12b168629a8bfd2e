"""Annotations of where a step's values lie: they are followed, and change no number."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.testing import assert_strategies_agree

STRATEGY = armillary.ShardedStrategy({"data": 2, "fsdp": 2, "tensor": 2})
WIDTH = 64


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy):
        rng = np.random.default_rng(0)
        inputs = rng.normal(size=(44, WIDTH)).astype(np.float32)
        exact = armillary.InputOptions(remainder="exact")
        source = armillary.data.from_arrays({"x": inputs}, batch_size=16)
        super().__init__(strategy.distribute_dataset(source, exact))
        self.strategy = strategy
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.model = nnx.List([self.up, self.down])
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)

    def train_step(self, iterator):
        self.strategy.run(self.improve, args=(next(iterator),))

    def improve(self, batch):
        def loss_fn(model):
            up, down = model
            hidden = jnp.tanh(up(batch["x"]))
            if isinstance(self.strategy, armillary.ShardedStrategy):
                hidden = self.strategy.experimental_split_to_logical_devices(
                    hidden, [1, 2]
                )
            outputs = down(hidden)
            if isinstance(self.strategy, armillary.ShardedStrategy):
                outputs = self.strategy.experimental_replicate_to_logical_devices(
                    outputs
                )
            losses = ((outputs - batch["x"]) ** 2).mean(axis=1)
            return armillary.compute_average_loss(losses)

        self.optimizer.update(
            self.model, armillary.all_reduce("sum", nnx.grad(loss_fn)(self.model))
        )


@pytest.mark.slow
def test_numbers_stay_what_they_are():
    one = armillary.OneDeviceStrategy("cpu:0")
    assert_strategies_agree(Trainer, [one, STRATEGY], steps=3)


def test_a_value_is_where_a_step_says():
    x = jnp.arange(8.0 * 4).reshape(8, 4)

    @armillary.function(strategy=STRATEGY)
    def places(x):
        split = STRATEGY.split_to_logical_devices(x, [1, 2])
        rows = STRATEGY.split_to_logical_devices(x, [2, 1])
        return split, rows, STRATEGY.replicate_to_logical_devices({"x": x})["x"]

    split, rows, whole = places(x)
    axes = [array.sharding.spec for array in (split, rows, whole)]
    assert axes[0][1] == axes[1][0] == "tensor"
    assert axes[2][0] == ("data", "fsdp")
    assert "tensor" not in jax.tree.leaves(tuple(axes[2]))
    for array in (split, rows, whole):
        np.testing.assert_array_equal(array, x)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([2], r"is \[2\], but the array has shape \(8, 3\): give one number"),
        ([1, 1], "but the mesh has 2 devices along 'tensor': split one axis in 2 pa"),
        ([2, 2], "split one axis in 2 parts, and give 1 for the others"),
        ([1, 2], r"but axis 1 of shape \(8, 3\) has no 2 equal parts: split another"),
    ],
)
def test_parts_that_there_are_not_are_an_error(parts, message):
    with pytest.raises(ValueError, match=message):
        STRATEGY.split_to_logical_devices(jnp.zeros((8, 3)), parts)


def test_a_value_on_one_device_is_refused():
    with pytest.raises(NotImplementedError, match="Use `split_to_logical_"):
        STRATEGY.experimental_assign_to_logical_device(jnp.zeros(3), 0)
