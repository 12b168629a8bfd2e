"""Trains a small CNN on handwritten digits, on several devices.

It shows a trainer and an evaluator under a controller, with checkpoints and summaries.
The data are the 1,797 images that come with scikit-learn, so nothing is downloaded.

    python examples/digits.py --devices 4 --run-dir runs/digits

It prints the loss and the accuracy of each 100 steps, and at the end the accuracy on
the test images, about 99%. Run the same command with more `--steps`, and training
continues from the last checkpoint. Compiled programs stay in `--cache-dir`, so later
runs start sooner.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import armillary

BATCH_SIZE = 64
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class CNN(nnx.Module):
    """Two convolutions, two dense layers and dropout, for 8 x 8 images."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 16, kernel_size=(3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, kernel_size=(3, 3), rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.dense1 = nnx.Linear(4 * 4 * 32, 64, rngs=rngs)
        self.dense2 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images: jax.Array, *, training: bool = False) -> jax.Array:
        """Returns logits of shape `(batch, 10)` for images `(batch, 8, 8, 1)`."""
        x = nnx.relu(self.conv1(images))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
        x = self.dropout(x.reshape(x.shape[0], -1), deterministic=not training)
        return self.dense2(nnx.relu(self.dense1(x)))


class Trainer(armillary.StandardTrainer):
    """Runs the training steps; each loop reports its mean loss and accuracy."""

    def __init__(
        self,
        dataset: armillary.data.DistributedDataset,
        strategy: armillary.distribute.Strategy,
        model: CNN,
        optimizer: nnx.Optimizer[CNN],
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.model = model
        self.optimizer = optimizer
        self.loss = nnx.metrics.Average("loss")
        self.accuracy = nnx.metrics.Accuracy()

    def train_loop_begin(self) -> None:
        self.loss.reset()
        self.accuracy.reset()

    def train_step(self, iterator) -> None:
        # Each device runs this function on its share of the batch.
        def step_fn(batch):
            def loss_fn(model):
                logits = model(batch["image"], training=True)
                losses = cross_entropy(logits, batch["label"])
                return jnp.mean(losses), (losses, logits)

            gradients, (losses, logits) = nnx.grad(loss_fn, has_aux=True)(self.model)
            # The mean over the whole batch, so all devices make the same update.
            gradients = armillary.all_reduce("mean", gradients)
            self.optimizer.update(self.model, gradients)
            self.loss.update(loss=losses)
            self.accuracy.update(logits=logits, labels=batch["label"])

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self) -> dict:
        return {"loss": self.loss.compute(), "accuracy": self.accuracy.compute()}


class Evaluator(armillary.StandardEvaluator):
    """Reports the accuracy over all test images, each counted once."""

    def __init__(
        self,
        dataset: armillary.data.DistributedDataset,
        strategy: armillary.distribute.Strategy,
        model: CNN,
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.model = model
        self.accuracy = nnx.metrics.Accuracy()

    def eval_begin(self) -> None:
        self.accuracy.reset()

    def eval_step(self, iterator) -> None:
        def step_fn(batch):
            logits = self.model(batch["image"])
            self.accuracy.update(logits=logits, labels=batch["label"])

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self) -> dict:
        return {"accuracy": self.accuracy.compute()}


def load_data() -> tuple[dict, dict]:
    """Returns the training and the test images, with every digit in both."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16.0
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels.astype("int32"), test_size=0.2, stratify=labels, random_state=0
    )
    train = {"image": train_images, "label": train_labels}
    return train, {"image": test_images, "label": test_labels}


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a CNN on handwritten digits.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/digits"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--steps-per-loop", type=int, default=100)
    parser.add_argument("--devices", type=int, default=4, help="virtual CPU devices")
    parser.add_argument("--cache-dir", type=Path, default=Path("runs/compiled"))
    options = parser.parse_args()
    armillary.xla.use_compilation_cache(options.cache_dir)
    # A CPU counts as one device, unless this is set before JAX is used.
    jax.config.update("jax_num_cpu_devices", options.devices)

    # All GPUs or TPUs of this machine. If it has none, the devices of its CPU.
    strategy = armillary.MirroredStrategy()
    train, test = load_data()
    train_data = armillary.data.from_arrays(
        train, batch_size=BATCH_SIZE, shuffle_seed=0, repeat=True
    )
    train_dataset = strategy.distribute_dataset(train_data)
    test_data = armillary.data.from_arrays(test, batch_size=BATCH_SIZE)
    test_dataset = strategy.distribute_dataset(test_data)
    with strategy.scope():
        model = CNN(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    trainer = Trainer(train_dataset, strategy, model, optimizer)
    # A run needs all of this to continue: the model, the optimizer, the random keys,
    # and the position in the training data. The trainer reaches them.
    checkpoint = armillary.Checkpoint(trainer=trainer)
    controller = armillary.Controller(
        trainer=trainer,
        evaluator=Evaluator(test_dataset, strategy, model),
        global_step=optimizer.step,  # The optimizer counts the steps.
        strategy=strategy,
        steps_per_loop=options.steps_per_loop,
        summary_dir=options.run_dir / "train",
        eval_summary_dir=options.run_dir / "eval",
        checkpoint_manager=armillary.CheckpointManager(
            checkpoint,
            options.run_dir / "checkpoints",
            checkpoint_interval=500,
        ),
    )
    result = controller.train_and_evaluate(train_steps=options.steps, eval_interval=500)

    print(f"Test accuracy {result['accuracy']:.2%}")
    print(f"The run is in {options.run_dir}. Open it with")
    print(f"  tensorboard --logdir {options.run_dir}")


if __name__ == "__main__":
    main()
