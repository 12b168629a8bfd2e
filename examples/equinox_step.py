"""Trains an Equinox model with a pure step, on several devices.

The step is a function: it takes a state and a batch, and returns the next state and
metrics. The state is a dictionary of the model, the state of an Optax optimizer and a
random key. `StepTrainer` runs the step on each device with its share of the batch. The
data are the 1,797 images of handwritten digits that come with scikit-learn.

    python examples/equinox_step.py --devices 4 --run-dir runs/equinox

It prints the loss of each 100 steps, and at the end the accuracy on the test images,
about 98%. Run the same command again, and training continues from the last checkpoint.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import armillary

BATCH_SIZE = 64
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class CNN(eqx.Module):
    """Two convolutions and two linear layers, for one image of shape `(1, 8, 8)`."""

    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    dropout: eqx.nn.Dropout
    hidden: eqx.nn.Linear
    output: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.first = eqx.nn.Conv2d(1, 16, kernel_size=3, padding=1, key=keys[0])
        self.second = eqx.nn.Conv2d(16, 32, kernel_size=3, padding=1, key=keys[1])
        self.pool = eqx.nn.MaxPool2d(kernel_size=2, stride=2)
        self.dropout = eqx.nn.Dropout(0.5)
        self.hidden = eqx.nn.Linear(4 * 4 * 32, 64, key=keys[2])
        self.output = eqx.nn.Linear(64, 10, key=keys[3])

    def __call__(self, image: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Returns logits of shape `(10,)`. Without a key, there is no dropout."""
        x = jax.nn.relu(self.first(image))
        x = self.pool(jax.nn.relu(self.second(x)))
        x = self.dropout(x.reshape(-1), key=key, inference=key is None)
        return self.output(jax.nn.relu(self.hidden(x)))


def make_state(optimizer: optax.GradientTransformation, seed: int = 0) -> dict:
    """Returns the state to begin with."""
    model_key, dropout_key = jax.random.split(jax.random.key(seed))
    model = CNN(model_key)
    parameters = eqx.filter(model, eqx.is_inexact_array)
    return {
        "model": model,
        "optimizer": optimizer.init(parameters),
        "key": dropout_key,
    }


def make_step(
    optimizer: optax.GradientTransformation,
) -> Callable[[dict, dict], tuple[dict, dict]]:
    """Returns the step, which runs on every replica."""

    def step(state: dict, batch: dict) -> tuple[dict, dict]:
        # A different key on each replica.
        next_key, key = jax.random.split(state["key"])

        def loss_fn(model: CNN):
            keys = jax.random.split(key, len(batch["label"]))
            logits = jax.vmap(model)(batch["image"], keys)
            losses = cross_entropy(logits, batch["label"])
            return jnp.mean(losses), (losses, logits)

        gradient_fn = eqx.filter_value_and_grad(loss_fn, has_aux=True)
        (_, (losses, logits)), gradients = gradient_fn(state["model"])
        gradients = armillary.all_reduce("mean", gradients)
        parameters = eqx.filter(state["model"], eqx.is_inexact_array)
        updates, optimizer_state = optimizer.update(
            gradients, state["optimizer"], parameters
        )
        next_state = {
            "model": eqx.apply_updates(state["model"], updates),
            "optimizer": optimizer_state,
            "key": next_key,
        }
        accuracy = logits.argmax(axis=-1) == batch["label"]
        return next_state, {"loss": losses, "accuracy": accuracy}

    return step


def evaluate(state: dict, batch: dict) -> dict:
    """Returns the metrics of a batch. The evaluator averages them over all examples."""
    logits = jax.vmap(state["model"])(batch["image"])
    return {"accuracy": logits.argmax(axis=-1) == batch["label"]}


def load_data() -> tuple[dict, dict]:
    """Returns the training and the test images, with every digit in both."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype("float32") / 16.0
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels.astype("int32"), test_size=0.2, stratify=labels, random_state=0
    )
    train = {"image": train_images, "label": train_labels}
    return train, {"image": test_images, "label": test_labels}


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains an Equinox model on digits.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/equinox"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--steps-per-loop", type=int, default=100)
    parser.add_argument("--devices", type=int, default=4, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    train, test = load_data()
    optimizer = optax.adamw(1e-3)
    trainer = armillary.StepTrainer(
        make_step(optimizer),
        make_state(optimizer),
        armillary.data.from_arrays(
            train, batch_size=BATCH_SIZE, shuffle_seed=0, repeat=True
        ),
        strategy=armillary.MirroredStrategy(),
    )
    test_data = armillary.data.from_arrays(test, batch_size=BATCH_SIZE)
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
