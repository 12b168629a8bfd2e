"""Trains on augmented images that Grain reads, and continues at the same image.

The Grain pipeline reads single images from a source with random access, shuffles them,
crops each image and erases a part of it at random, and makes batches. Each image has
its own random numbers, so they do not depend on the threads. The position in the data
is part of the checkpoint, so a resumed run sees the same crops as a run that was not
stopped. The data are the 1,797 images of digits that come with scikit-learn.

    python examples/grain_images.py --devices 2 --run-dir runs/grain

It needs the extra `grain`. It prints the loss of each 100 steps, and at the end the
accuracy on the test images.
"""

import argparse
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import armillary

BATCH_SIZE = 64
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Digits:
    """A source with random access: Grain asks for one example by its number.

    A source of your own opens a file here, for example a JPEG.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict:
        return {"image": self.images[index], "label": self.labels[index]}

    def __repr__(self) -> str:
        return f"Digits({len(self)})"


class Crop(grain.transforms.RandomMap):
    """Moves an image by up to one pixel: it adds an edge, and cuts the size out."""

    def random_map(self, element: dict, rng: np.random.Generator) -> dict:
        height, width = element["image"].shape
        top, left = rng.integers(0, 3, size=2)
        padded = np.pad(element["image"], 1)
        image = padded[top : top + height, left : left + width]
        return {**element, "image": image}


class Erase(grain.transforms.RandomMap):
    """Makes a square of two by two pixels black (random erasing, arXiv:1708.04896)."""

    def random_map(self, element: dict, rng: np.random.Generator) -> dict:
        image = element["image"].copy()
        height, width = image.shape
        top, left = rng.integers(0, [height - 1, width - 1])
        image[top : top + 2, left : left + 2] = 0
        return {**element, "image": image}


def as_input(element: dict) -> dict:
    """Returns the image with a channel, in 0 to 1, as the model takes it."""
    image = element["image"].astype(np.float32)[..., None] / 16.0
    return {"image": image, "label": element["label"]}


def make_train_data(source: Digits, *, seed: int = 0) -> grain.IterDataset:
    """Returns shuffled and augmented batches without end."""
    return (
        grain.MapDataset.source(source)
        .seed(seed)
        .shuffle()
        .repeat()
        .random_map(Crop())
        .random_map(Erase())
        .map(as_input)
        .batch(BATCH_SIZE, drop_remainder=True)
        .to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=16))
    )


def make_test_data(source: Digits) -> grain.MapDataset:
    """Returns all images once, in order."""
    return grain.MapDataset.source(source).map(as_input).batch(BATCH_SIZE)


def load_data() -> tuple[Digits, Digits]:
    """Returns the training and the test images, with every digit in both."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        images.reshape(-1, 8, 8).astype(np.uint8),
        labels.astype(np.int32),
        test_size=0.2,
        stratify=labels,
        random_state=0,
    )
    train_images, test_images, train_labels, test_labels = map(np.asarray, parts)
    return Digits(train_images, train_labels), Digits(test_images, test_labels)


def make_model() -> nnx.Sequential:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        nnx.Conv(1, 32, kernel_size=(3, 3), strides=2, rngs=rngs),
        nnx.relu,
        nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs),
        nnx.relu,
        lambda x: x.reshape(len(x), -1),
        nnx.Linear(4 * 4 * 64, 10, rngs=rngs),
    )


class Trainer(armillary.StandardTrainer):
    """Trains a model; each loop reports its mean loss."""

    def __init__(
        self,
        dataset: armillary.data.DistributedDataset,
        strategy: armillary.distribute.Strategy,
        model: nnx.Sequential,
        optimizer: nnx.Optimizer[nnx.Sequential],
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.model = model
        self.optimizer = optimizer
        self.loss = nnx.metrics.Average("loss")

    def train_loop_begin(self) -> None:
        self.loss.reset()

    def train_step(self, iterator) -> None:
        self.strategy.run(self.replica_step, args=(next(iterator),))

    def replica_step(self, batch) -> None:
        def loss_fn(model):
            losses = cross_entropy(model(batch["image"]), batch["label"])
            return jnp.mean(losses), losses

        gradients, losses = nnx.grad(loss_fn, has_aux=True)(self.model)
        gradients = armillary.all_reduce("mean", gradients)
        self.optimizer.update(self.model, gradients)
        self.loss.update(loss=losses)

    def train_loop_end(self) -> dict:
        return {"loss": self.loss.compute()}


class Evaluator(armillary.StandardEvaluator):
    """Reports the accuracy over all test images, each counted once."""

    def __init__(
        self,
        dataset: armillary.data.DistributedDataset,
        strategy: armillary.distribute.Strategy,
        model: nnx.Sequential,
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.model = model
        self.accuracy = nnx.metrics.Accuracy()

    def eval_begin(self) -> None:
        self.accuracy.reset()

    def eval_step(self, iterator) -> None:
        self.strategy.run(self.replica_step, args=(next(iterator),))

    def replica_step(self, batch) -> None:
        self.accuracy.update(logits=self.model(batch["image"]), labels=batch["label"])

    def eval_end(self) -> dict:
        return {"accuracy": self.accuracy.compute()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on images that Grain reads.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/grain"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--steps-per-loop", type=int, default=100)
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    strategy = armillary.MirroredStrategy()
    train_source, test_source = load_data()
    train_data = make_train_data(train_source)
    test_data = make_test_data(test_source)
    with strategy.scope():
        model = make_model()
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    trainer = Trainer(
        strategy.distribute_dataset(train_data), strategy, model, optimizer
    )
    controller = armillary.Controller(
        trainer=trainer,
        evaluator=Evaluator(strategy.distribute_dataset(test_data), strategy, model),
        global_step=optimizer.step,
        strategy=strategy,
        steps_per_loop=options.steps_per_loop,
        summary_dir=options.run_dir / "train",
        eval_summary_dir=options.run_dir / "eval",
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer),
            options.run_dir / "checkpoints",
            checkpoint_interval=500,
        ),
    )
    result = controller.train_and_evaluate(train_steps=options.steps)
    print(f"Test accuracy {result['accuracy']:.2%}")


if __name__ == "__main__":
    main()
