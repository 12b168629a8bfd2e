"""Fits a Keras model on several devices, after "Distributed training with Keras".

`--data-dir` is a folder with the four standard IDX files of MNIST, or of a dataset in
the same format. Without it, the data are the 1,797 digits that come with scikit-learn.

    python examples/mnist_keras_fit.py --devices 4 --data-dir ~/data/mnist

It needs the extra `keras`. It prints Keras' own progress, and the accuracy on the test
images, about 91% for the digits of scikit-learn.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import jax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import armillary
from idx import read_split

# Keras reads it when it is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")
import keras

BATCH_SIZE_PER_REPLICA = 32


def read_digits() -> tuple[dict, dict]:
    """Returns training and test images of shape `(n, 8, 8, 1)` in 0..1, with labels."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16.0
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels.astype("int32"), test_size=0.2, stratify=labels, random_state=0
    )
    train = {"image": train_x, "label": train_y}
    return train, {"image": test_x, "label": test_y}


def make_model(image_shape: tuple[int, ...]) -> Any:
    """Returns the compiled model of the tutorial."""
    model = keras.Sequential(
        [
            keras.layers.Input(image_shape),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(),
        metrics=["accuracy"],
    )
    return model


def decay(epoch: int) -> float:
    """Returns the learning rate of an epoch."""
    return 1e-3 if epoch < 10 else 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description="Fits a Keras model on digits.")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices")
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    if options.data_dir is None:
        train, test = read_digits()
    else:
        train = read_split(options.data_dir, "train")
        test = read_split(options.data_dir, "t10k")

    strategy = armillary.MirroredStrategy()
    print(f"Number of devices: {strategy.num_replicas_in_sync}")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make_model(train["image"].shape[1:])

    model.fit(
        train["image"],
        train["label"],
        batch_size=BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync,
        epochs=options.epochs,
        callbacks=[keras.callbacks.LearningRateScheduler(decay)],
        verbose=2,
    )
    _, accuracy = model.evaluate(test["image"], test["label"], verbose=0)
    print(f"Test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
