"""Trains in a loop written in Python, with a strategy but without a trainer.

`strategy.run` calls a step once on each replica, `strategy.reduce` combines the
results, and `armillary.function` compiles both into one program. The data are the 1,797
images of digits that come with scikit-learn.

    python examples/custom_loop.py --devices 4

It prints the loss of each epoch, and at the end the accuracy on the test images, about
97%. It saves nothing, so each run begins again.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import armillary

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Classifier(nnx.Module):
    """Two dense layers, for images of 64 pixels."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.output = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits of shape `(batch, 10)` for images `(batch, 64)`."""
        return self.output(nnx.relu(self.hidden(images)))


def load_data() -> tuple[dict, dict]:
    """Returns the training and the test images, with every digit in both."""
    images, labels = load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images.astype("float32") / 16.0,
        labels.astype("int32"),
        test_size=0.2,
        stratify=labels,
        random_state=0,
    )
    train = {"image": train_images, "label": train_labels}
    return train, {"image": test_images, "label": test_labels}


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains in a loop of its own.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--devices", type=int, default=4, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    strategy = armillary.MirroredStrategy()
    train, test = load_data()
    # One pass over the data for each `iter`, in another order each time.
    train_data = armillary.data.from_arrays(
        train, batch_size=32, shuffle_seed=0, drop_remainder=True
    )
    train_dataset = strategy.distribute_dataset(train_data)
    # The last batch is filled up, and `batch["mask"]` is true for real rows.
    test_dataset = strategy.distribute_dataset(
        armillary.data.from_arrays(test, batch_size=64),
        armillary.data.InputOptions(remainder="pad"),
    )
    with strategy.scope():
        model = Classifier(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @armillary.function
    def train_step(batch):
        def step_fn(batch):
            def loss_fn(model):
                losses = cross_entropy(model(batch["image"]), batch["label"])
                return jnp.mean(losses)

            loss, gradients = nnx.value_and_grad(loss_fn)(model)
            gradients = armillary.all_reduce("mean", gradients)
            optimizer.update(model, gradients)
            return loss

        losses = strategy.run(step_fn, args=(batch,))
        return strategy.reduce(armillary.distribute.ReduceOp.MEAN, losses, axis=None)

    @armillary.function
    def count_correct(batch):
        def step_fn(batch):
            predictions = jnp.argmax(model(batch["image"]), axis=-1)
            return jnp.sum((predictions == batch["label"]) & batch["mask"])

        counts = strategy.run(step_fn, args=(batch,))
        return strategy.reduce(armillary.distribute.ReduceOp.SUM, counts, axis=None)

    for epoch in range(options.epochs):
        losses = [train_step(batch) for batch in train_dataset]
        print(f"epoch {epoch + 1:2d}  loss {jnp.mean(jnp.stack(losses)):.4f}")

    # A few steps more, from an iterator in hand.
    iterator = iter(train_dataset)
    for _ in range(10):
        train_step(next(iterator))

    num_correct = sum(int(count_correct(batch)) for batch in test_dataset)
    print(f"Test accuracy {num_correct / len(test['label']):.2%}")


if __name__ == "__main__":
    main()
