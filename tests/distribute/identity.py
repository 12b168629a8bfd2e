"""A trainer whose model learns to return its input, for tests of meshes and rules."""

import jax.numpy as jnp
import optax
from flax import nnx

import armillary


class IdentityTrainer(armillary.StandardTrainer):
    """Trains a model to return its input, in batches of 16 rows."""

    def __init__(self, strategy, model, rows, **options):
        super().__init__(
            armillary.data.from_arrays({"x": rows}, batch_size=16, repeat=True),
            options=armillary.StandardTrainerOptions(**options),
        )
        self.strategy = strategy
        self.model = model
        self.optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        self.loss = nnx.metrics.Average("loss")

    def train_step(self, iterator):
        def step_fn(batch):
            def loss_fn(model):
                return ((model(batch["x"]) - batch["x"]) ** 2).mean()

            loss, gradients = nnx.value_and_grad(loss_fn)(self.model)
            gradients = armillary.all_reduce("mean", gradients)
            self.optimizer.update(self.model, gradients)
            self.loss.update(loss=loss.astype(jnp.float32))

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self):
        return {"loss": self.loss.compute()}
