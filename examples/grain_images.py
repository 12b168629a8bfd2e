"""Trains on files of images that Grain reads and augments, and continues exactly.

The Grain pipeline opens single files in a random order, crops each image, erases a part
of it at random, and makes batches. Each image has its own random numbers, so they do
not depend on the threads. The position in the data is part of the checkpoint, so a
resumed run sees the same crops as a run that was not stopped.

    python examples/grain_images.py --devices 2 --run-dir runs/grain

Without `--data-dir`, it writes the 1,797 images of digits that come with scikit-learn
as files, and reads these. With `--data-dir`, it reads your files, in one folder for
each class, such as `photos/cat/1.jpg` and `photos/dog/1.jpg`.

It needs the extra `grain`. It prints the loss of each 100 steps, and at the end the
accuracy on the test images, about 96% for the digits.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import armillary

BATCH_SIZE = 64
SIZE = 8
"""Height and width to which each image is scaled. Photographs need more."""
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class ImageFiles:
    """A source with random access: Grain asks for one example by its number."""

    def __init__(self, files: Sequence[Path], classes: Sequence[str]) -> None:
        self.files = files
        self.classes = classes

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict:
        """Returns gray pixels of shape `(SIZE, SIZE)`, and the number of the class."""
        file = self.files[index]
        with Image.open(file) as image:
            pixels = np.asarray(image.convert("L").resize((SIZE, SIZE)))
        label = np.int32(self.classes.index(file.parent.name))
        return {"image": pixels, "label": label}

    def __repr__(self) -> str:
        return f"ImageFiles({len(self)})"


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
    image = element["image"].astype(np.float32)[..., None] / 255.0
    return {"image": image, "label": element["label"]}


def make_train_data(source: ImageFiles, *, seed: int = 0) -> grain.IterDataset:
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


def make_test_data(source: ImageFiles) -> grain.MapDataset:
    """Returns all images once, in order."""
    return grain.MapDataset.source(source).map(as_input).batch(BATCH_SIZE)


def write_digits(folder: Path) -> None:
    """Writes the images of scikit-learn, in one folder for each digit."""
    images, labels = load_digits(return_X_y=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        file = folder / str(label) / f"{number:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = 15 * image.reshape(8, 8)
        Image.fromarray(pixels.astype(np.uint8)).save(file)


def load_data(folder: Path) -> tuple[ImageFiles, ImageFiles]:
    """Returns the training and the test images, with every class in both."""
    files = sorted(file for file in folder.glob("*/*") if file.is_file())
    if not files:
        raise SystemExit(
            f"`--data-dir` is {str(folder)!r}, but it has no files in folders. Pass a "
            "folder with one folder for each class, and images in them."
        )
    labels = [file.parent.name for file in files]
    parts = train_test_split(files, test_size=0.2, stratify=labels, random_state=0)
    classes = sorted(set(labels))
    train, test = (ImageFiles(list(part), classes) for part in parts)
    return train, test


def make_model(num_classes: int) -> nnx.Sequential:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        nnx.Conv(1, 32, kernel_size=(3, 3), strides=2, rngs=rngs),
        nnx.relu,
        nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs),
        nnx.relu,
        lambda x: x.reshape(len(x), -1),
        nnx.Linear((SIZE // 2) ** 2 * 64, num_classes, rngs=rngs),
    )


def make_functions(
    graph: nnx.GraphDef, optimizer: optax.GradientTransformation
) -> tuple[Callable[[dict, dict], tuple[dict, dict]], Callable[[dict, dict], dict]]:
    """Returns the training step and the evaluation, which run on every replica."""

    def step(state: dict, batch: dict) -> tuple[dict, dict]:
        def loss_fn(params: nnx.State):
            logits = nnx.merge(graph, params)(batch["image"])
            losses = cross_entropy(logits, batch["label"])
            return jnp.mean(losses), losses

        gradients, losses = jax.grad(loss_fn, has_aux=True)(state["params"])
        gradients = armillary.all_reduce("mean", gradients)
        updates, opt_state = optimizer.update(gradients, state["optimizer"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": opt_state}, {"loss": losses}

    def evaluate(state: dict, batch: dict) -> dict:
        logits = nnx.merge(graph, state["params"])(batch["image"])
        return {"accuracy": logits.argmax(axis=-1) == batch["label"]}

    return step, evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on images that Grain reads.")
    parser.add_argument("--data-dir", type=Path, help="one folder for each class")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/grain"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--steps-per-loop", type=int, default=100)
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    folder = options.data_dir
    if folder is None:
        folder = options.run_dir / "digits"
        write_digits(folder)
    train_source, test_source = load_data(folder)

    graph, params = nnx.split(make_model(len(train_source.classes)))
    optimizer = optax.adam(1e-3)
    step, evaluate = make_functions(graph, optimizer)
    trainer = armillary.StepTrainer(
        step,
        {"params": params, "optimizer": optimizer.init(params)},
        make_train_data(train_source),
        strategy=armillary.MirroredStrategy(),
    )
    test_data = make_test_data(test_source)
    controller = armillary.Controller(
        trainer=trainer,
        evaluator=armillary.StepEvaluator(evaluate, trainer, test_data),
        global_step=trainer.global_step,
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
