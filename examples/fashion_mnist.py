"""Trains the CNN of the custom training loop tutorial on Fashion-MNIST.

`--data-dir` is a folder with the four standard IDX files, as the dataset's authors
publish them. Any dataset in the same format works, for example MNIST.

    python examples/fashion_mnist.py --data-dir ~/data/fashion_mnist

It prints the loss and the accuracy of each loop, and after each epoch the accuracy on
the test images.
"""

import argparse
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import armillary
from idx import read_split

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class CNN(nnx.Module):
    """Two convolutions and two dense layers, for 28 x 28 images."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.dense1 = nnx.Linear(7 * 7 * 64, 64, rngs=rngs)
        self.dense2 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits of shape `(batch, 10)` for images `(batch, 28, 28, 1)`."""
        x = nnx.max_pool(nnx.relu(self.conv1(images)), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
        return self.dense2(nnx.relu(self.dense1(x.reshape(x.shape[0], -1))))


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
        self.metrics = make_metrics()

    def train_loop_begin(self) -> None:
        self.metrics.reset()

    def train_step(self, iterator) -> None:
        def step_fn(batch):
            def loss_fn(model):
                logits = model(batch["image"])
                losses = cross_entropy(logits, batch["label"])
                return jnp.mean(losses), (losses, logits)

            gradients, (losses, logits) = nnx.grad(loss_fn, has_aux=True)(self.model)
            gradients = armillary.all_reduce("mean", gradients)
            self.optimizer.update(self.model, gradients)
            self.metrics.update(loss=losses, logits=logits, labels=batch["label"])

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self) -> dict:
        return self.metrics.compute()


class Evaluator(armillary.StandardEvaluator):
    """Reports loss and accuracy over all test images, each counted once."""

    def __init__(
        self,
        dataset: armillary.data.DistributedDataset,
        strategy: armillary.distribute.Strategy,
        model: CNN,
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.model = model
        self.metrics = make_metrics()

    def eval_begin(self) -> None:
        self.metrics.reset()

    def eval_step(self, iterator) -> None:
        def step_fn(batch):
            logits = self.model(batch["image"])
            losses = cross_entropy(logits, batch["label"])
            self.metrics.update(loss=losses, logits=logits, labels=batch["label"])

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self) -> dict:
        return self.metrics.compute()


def make_metrics() -> nnx.MultiMetric:
    """Returns the mean loss and the accuracy of the examples seen."""
    return nnx.MultiMetric(
        loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy()
    )


def positive_int(text: str) -> int:
    """Returns the number in an argument, or makes `argparse` refuse it."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a CNN on Fashion-MNIST.")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/fashion_mnist"))
    parser.add_argument("--batch-size", type=positive_int, default=64)
    parser.add_argument("--epochs", type=positive_int, default=10)
    options = parser.parse_args()
    try:
        train = read_split(options.data_dir, "train")
        test = read_split(options.data_dir, "t10k")
    except (OSError, ValueError) as error:
        raise SystemExit(f"`--data-dir` cannot be read: {error}") from error
    steps_per_epoch = math.ceil(len(train["label"]) / options.batch_size)

    # All GPUs of this machine, or its CPU where there are none.
    strategy = armillary.MirroredStrategy()
    train_data = armillary.data.from_arrays(
        train, batch_size=options.batch_size, shuffle_seed=0, repeat=True
    )
    test_data = armillary.data.from_arrays(test, batch_size=options.batch_size)
    train_dataset = strategy.distribute_dataset(train_data)
    with strategy.scope():
        model = CNN(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    trainer = Trainer(train_dataset, strategy, model, optimizer)
    controller = armillary.Controller(
        trainer=trainer,
        evaluator=Evaluator(strategy.distribute_dataset(test_data), strategy, model),
        global_step=optimizer.step,
        strategy=strategy,
        steps_per_loop=steps_per_epoch,
        summary_dir=options.run_dir / "train",
        eval_summary_dir=options.run_dir / "eval",
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer),
            options.run_dir / "checkpoints",
            checkpoint_interval=steps_per_epoch,
        ),
    )
    result = controller.train_and_evaluate(
        train_steps=options.epochs * steps_per_epoch, eval_interval=steps_per_epoch
    )
    print(f"Test accuracy {result['accuracy']:.2%}. The run is in {options.run_dir}.")


if __name__ == "__main__":
    main()
