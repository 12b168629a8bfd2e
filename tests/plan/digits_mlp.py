"""A program as `armillary plan` takes it: an MLP on images of digits."""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import armillary

BATCH_SIZE = 64
NUM_PARAMETERS = 64 * 128 + 128 + 128 * 10 + 10
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.output = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.output(nnx.relu(self.hidden(images)))


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy: Any, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, armillary.StandardTrainerOptions(**options))
        self.strategy, self.model = strategy, MLP(nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(1e-3), wrt=nnx.Param)
        self.loss = nnx.metrics.Average("loss")

    def train_loop_begin(self) -> None:
        self.loss.reset()

    def train_step(self, iterator: Any) -> None:
        self.strategy.run(self.improve, args=(next(iterator),))

    def improve(self, batch: Any) -> None:
        def loss_fn(model: MLP) -> tuple[jax.Array, jax.Array]:
            losses = cross_entropy(model(batch["image"]), batch["label"])
            return armillary.compute_average_loss(losses), losses

        grads, losses = nnx.grad(loss_fn, has_aux=True)(self.model)
        grads = armillary.all_reduce("sum", grads)
        self.optimizer.update(self.model, grads)
        self.loss.update(loss=losses)

    def train_loop_end(self) -> armillary.typing.Output:
        return {"loss": self.loss.compute()}


def make_arrays(num_examples: int = 256) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    image = rng.normal(size=(num_examples, 64)).astype(np.float32)
    return {"image": image, "label": np.arange(num_examples, dtype=np.int32) % 10}


def make_trainer(
    num_replicas: int = 1,
    kind: type[Trainer] = Trainer,
    input_options: armillary.data.InputOptions | None = None,
    **options: Any,
) -> Trainer:
    strategy = armillary.MirroredStrategy(jax.devices("cpu")[:num_replicas])
    source = armillary.data.from_arrays(
        make_arrays(), batch_size=BATCH_SIZE, shuffle_seed=0, repeat=True
    )
    dataset = strategy.distribute_dataset(source, input_options)
    return kind(strategy, dataset, **options)


def make_controller() -> armillary.Controller:
    trainer = make_trainer()
    return armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=trainer.strategy,
        steps_per_loop=100,
    )
