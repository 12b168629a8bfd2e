"""Adapts a trained model to new classes with low-rank adapters (LoRA).

First, a network learns the digits 0 to 4 of scikit-learn's images. Then its weights are
frozen, and only two narrow matrices at each layer are trained on the digits 5 to 9. The
gradient, the optimizer and the checkpoints have `LoRAParam` variables alone. At the
end, the adapters are merged into the weights, and the program exports the network.

    python examples/lora.py --devices 2 --run-dir runs/lora

It prints the number of trained parameters, the accuracy on the digits 5 to 9 before and
after, and the path of the export. With more `--steps`, the training of the adapters
continues from its last checkpoint.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import armillary

BASE_STEPS = 200
BATCH_SIZE = 64
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Network(nnx.Module):
    """Three dense layers for images of 64 pixels."""

    def __init__(self, rngs: nnx.Rngs, width: int = 128) -> None:
        self.first = nnx.Linear(64, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.output = nnx.Linear(width, 5, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits of shape `(batch, 5)` for images `(batch, 64)`."""
        x = nnx.relu(self.first(images))
        return self.output(nnx.relu(self.second(x)))


class Trainer(armillary.StandardTrainer):
    """Trains the variables that `wrt` selects; all others stay as they are."""

    def __init__(
        self,
        dataset: armillary.data.DistributedDataset,
        strategy: armillary.distribute.Strategy,
        model: Network,
        wrt: type[nnx.Param],
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.model = model
        self.wrt = wrt
        self.optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=wrt)
        self.loss = nnx.metrics.Average("loss")

    def train_loop_begin(self) -> None:
        self.loss.reset()

    def train_step(self, iterator) -> None:
        self.strategy.run(self.replica_step, args=(next(iterator),))

    def replica_step(self, batch) -> None:
        def loss_fn(model):
            losses = cross_entropy(model(batch["image"]), batch["label"])
            return jnp.mean(losses), losses

        selected = nnx.DiffState(0, self.wrt)
        gradient_fn = nnx.grad(loss_fn, argnums=selected, has_aux=True)
        gradients, losses = gradient_fn(self.model)
        gradients = armillary.all_reduce("mean", gradients)
        self.optimizer.update(self.model, gradients)
        self.loss.update(loss=losses)

    def train_loop_end(self) -> dict:
        return {"loss": self.loss.compute()}


def count(model: Network, kind: type) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, kind)))


def load_data(first: int) -> tuple[dict, dict]:
    """Returns images to train on and to test with, of the five digits from `first`."""
    images, digits = load_digits(return_X_y=True)
    is_wanted = (digits >= first) & (digits < first + 5)
    images = images[is_wanted].astype("float32") / 16.0
    labels = (digits[is_wanted] - first).astype("int32")
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    train = {"image": train_images, "label": train_labels}
    return train, {"image": test_images, "label": test_labels}


def train(
    model: Network,
    data: dict,
    *,
    wrt: type[nnx.Param],
    strategy: armillary.distribute.Strategy,
    folder: Path,
    num_steps: int,
    leave_out: list | None = None,
) -> None:
    """Trains the variables of one type up to a step. A stopped run continues.

    Args:
        model: The model.
        data: The images and labels to train on.
        wrt: The type of the variables to train.
        strategy: The strategy.
        folder: The folder of the checkpoints and the summaries.
        num_steps: The step to end at.
        leave_out: The frozen variables, of which checkpoints hold only digests.
    """
    source = armillary.data.from_arrays(
        data, batch_size=BATCH_SIZE, shuffle_seed=0, repeat=True
    )
    with strategy.scope():
        trainer = Trainer(strategy.distribute_dataset(source), strategy, model, wrt)
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=strategy,
        steps_per_loop=100,
        summary_dir=folder / "train",
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer, leave_out=leave_out),
            folder / "checkpoints",
            checkpoint_interval=100,
        ),
    )
    controller.train(num_steps)


def compute_accuracy(model: Network, data: dict) -> float:
    return float(np.mean(model(data["image"]).argmax(axis=-1) == data["label"]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Adapts a model to new classes.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/lora"))
    parser.add_argument("--steps", type=int, default=300, help="of the adapters")
    parser.add_argument("--rank", type=int, default=4, help="width of the adapters")
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    strategy = armillary.MirroredStrategy()
    old_data, _ = load_data(first=0)
    new_data, test_data = load_data(first=5)
    model = Network(nnx.Rngs(0))
    run_dir = options.run_dir
    train(
        model,
        old_data,
        wrt=nnx.Param,
        strategy=strategy,
        folder=run_dir / "base",
        num_steps=BASE_STEPS,
    )

    armillary.lora.add(model, rank=options.rank, where="kernel", rngs=nnx.Rngs(1))
    before = compute_accuracy(model, test_data)
    num_adapters = count(model, nnx.LoRAParam)
    print(f"Trains {num_adapters} of {count(model, nnx.Param)} parameters")
    train(
        model,
        new_data,
        wrt=nnx.LoRAParam,
        strategy=strategy,
        folder=run_dir / "adapted",
        num_steps=options.steps,
        leave_out=armillary.lora.base(model),
    )

    merged = armillary.lora.merge(model)
    export = armillary.actions.ExportModel(
        lambda images: {"digit": 5 + merged(images).argmax(axis=-1)},
        armillary.actions.ExportFileManager(
            run_dir / "exports" / "model", next_id_fn=lambda: options.steps
        ),
        args=(jax.ShapeDtypeStruct((1, 64), "float32"),),
        polymorphic_batch_size=True,
    )
    export(None)
    print(f"The export is {run_dir}/exports/model-{options.steps}")
    print(f"Test accuracy {before:.2%} before")
    print(f"Test accuracy {compute_accuracy(merged, test_data):.2%}")


if __name__ == "__main__":
    main()
