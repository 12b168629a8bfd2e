"""Sharded strategies, and trainers whose arrays are worth dividing."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import armillary
from armillary import ShardedStrategy
from armillary.data import from_arrays
from tests.problems import (
    Classifier,
    make_digits,
    read_leaves,
)

CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
RULES = {
    "first/kernel": PartitionSpec("fsdp", "tensor"),
    "first/bias|norm": PartitionSpec("tensor"),
    "last/kernel": PartitionSpec("tensor"),
}
FIRST_RULES = {"first/kernel": RULES["first/kernel"]}
MAKERS = {
    "one device": lambda: armillary.OneDeviceStrategy("cpu:1"),
    "mirrored": lambda: armillary.MirroredStrategy(jax.devices()[:2]),
    "fsdp": ShardedStrategy,
    "cube": lambda: ShardedStrategy(CUBE, RULES),
    "odd": lambda: ShardedStrategy({"data": 3, "fsdp": 2}, devices=jax.devices()[:6]),
}


class Wide(nnx.Module):
    """A classifier with every kind of state, and arrays that are worth to be split."""

    def __init__(self, dtype=jnp.float32, *, has_conv=False):
        settings = {"rngs": nnx.Rngs(0), "dtype": dtype, "param_dtype": dtype}
        self.conv = nnx.Conv(1, 4, (3, 3), **settings) if has_conv else None
        self.first = nnx.Linear(64, 64, **settings)
        self.norm = nnx.BatchNorm(64, **settings)
        for statistic in (self.norm.mean, self.norm.var):
            statistic.set_value(statistic[...].astype(dtype))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.last = nnx.Linear(64, 3, **settings)

    def __call__(self, x):
        if self.conv is not None:
            x = nnx.max_pool(nnx.relu(self.conv(x)), (2, 2), (2, 2))
        x = self.norm(self.first(x.reshape(x.shape[0], -1)))
        return self.last(self.dropout(nnx.relu(x)))


def make_trainer(strategy, transform=None, dataset=None, **options):
    return Classifier(
        strategy, Wide(), transform or optax.adam(1e-2), dataset, **options
    )


class Linear(armillary.StandardTrainer):
    """Trains one layer, whose programs compile fast."""

    def __init__(self, strategy, dataset=None, **options):
        data = from_arrays(make_digits(70), batch_size=16)
        super().__init__(
            dataset or strategy.distribute_dataset(data),
            armillary.StandardTrainerOptions(**options),
        )
        self.strategy = strategy
        self.model = nnx.Dict(
            first=nnx.Linear(64, 64, rngs=nnx.Rngs(0)),
            dropout=nnx.Dropout(0.5, rngs=nnx.Rngs(1)),
        )
        self.optimizer = nnx.Optimizer(self.model, optax.adam(1e-2), wrt=nnx.Param)

    def train_step(self, iterator):
        def step_fn(batch):
            def loss_fn(model):
                image = batch["image"].reshape(-1, 64)
                output = model["dropout"](model["first"](image))
                losses = jnp.mean((output - image) ** 2, axis=1)
                return armillary.compute_average_loss(losses)

            self.optimizer.update(
                self.model, armillary.all_reduce("sum", nnx.grad(loss_fn)(self.model))
            )

        self.strategy.run(step_fn, args=(next(iterator),))


def specs_of(root):
    return {path: leaf.sharding.spec for path, leaf in read_leaves(root).items()}
