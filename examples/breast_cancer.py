"""Classifies tumors as malignant or benign, with metrics and rich summaries.

It shows the area under the ROC curve, the F1 score, histograms of weights and
gradients, and the confusion matrix as an image. The data are the 569 cases that come
with scikit-learn.

    python examples/breast_cancer.py --devices 2 --run-dir runs/breast_cancer

It prints the area, about 0.99, the F1 score, and the number of missed tumors. Curves,
histograms and images are in TensorBoard: `tensorboard --logdir runs/breast_cancer`.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import armillary
from armillary import metrics
from armillary.summary import Histogram, Image, Text


class Trainer(armillary.StandardTrainer):
    """Reports how the gradients of a loop and the weights after it are distributed."""

    def __init__(
        self,
        dataset: armillary.data.DistributedDataset,
        strategy: armillary.distribute.Strategy,
        model: nnx.Linear,
        optimizer: nnx.Optimizer[nnx.Linear],
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.model = model
        self.optimizer = optimizer
        self.gradients = metrics.Distribution()

    def train_loop_begin(self) -> None:
        self.gradients.reset()

    def train_step(self, iterator) -> None:
        def step_fn(batch):
            def loss_fn(model):
                logits = model(batch["x"])[:, 0]
                losses = optax.sigmoid_binary_cross_entropy(logits, batch["y"])
                return jnp.mean(losses)

            gradients = armillary.all_reduce("mean", nnx.grad(loss_fn)(self.model))
            self.optimizer.update(self.model, gradients)
            self.gradients.update(values=gradients)

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self) -> dict:
        return {"gradients": self.gradients.compute(), "weights": Histogram(self.model)}


class Evaluator(armillary.StandardEvaluator):
    """Reports metrics over all test cases, each counted once."""

    def __init__(
        self,
        dataset: armillary.data.DistributedDataset,
        strategy: armillary.distribute.Strategy,
        model: nnx.Linear,
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.model = model
        self.metrics = nnx.MultiMetric(
            f1=metrics.F1Score(threshold=0.0),
            area=metrics.AUC(),
            matrix=metrics.ConfusionMatrix(threshold=0.0),
        )

    def eval_begin(self) -> None:
        self.metrics.reset()

    def eval_step(self, iterator) -> None:
        def step_fn(batch):
            self.metrics.update(logits=self.model(batch["x"])[:, 0], labels=batch["y"])

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self) -> dict:
        output = self.metrics.compute()
        matrix = output.pop("matrix")
        output["matrix"] = Image(matrix / matrix.sum(axis=1, keepdims=True))
        output["missed"] = Text(f"Of {matrix[1].sum()} tumors, {matrix[1, 0]} missed.")
        return output


def load_data() -> tuple[dict, dict]:
    """Returns training and test data; malignant tumors are labeled 1."""
    x, y = load_breast_cancer(return_X_y=True)
    x, test_x, y, test_y = train_test_split(x, 1 - y, stratify=y, random_state=0)
    scaler = StandardScaler().fit(x)

    def scale(part: Any) -> np.ndarray:
        return np.asarray(scaler.transform(part), "float32")

    return {"x": scale(x), "y": y}, {"x": scale(test_x), "y": test_y}


def main() -> None:
    parser = argparse.ArgumentParser(description="Classifies tumors.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/breast_cancer"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    strategy = armillary.MirroredStrategy()
    train, test = load_data()
    train_data = armillary.data.from_arrays(
        train, batch_size=32, shuffle_seed=0, repeat=True
    )
    train_dataset = strategy.distribute_dataset(train_data)
    # The last batch of the 143 cases has 15. An evaluation counts them once, too.
    test_data = armillary.data.from_arrays(test, batch_size=64)
    test_dataset = strategy.distribute_dataset(test_data)
    model = nnx.Linear(30, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    controller = armillary.Controller(
        trainer=Trainer(train_dataset, strategy, model, optimizer),
        evaluator=Evaluator(test_dataset, strategy, model),
        global_step=optimizer.step,
        strategy=strategy,
        steps_per_loop=50,
        summary_dir=options.run_dir / "train",
        eval_summary_dir=options.run_dir / "eval",
    )
    result = controller.train_and_evaluate(train_steps=options.steps, eval_interval=100)

    print(f"Area under the ROC curve {result['area']:.4f}, F1 {result['f1']:.4f}")
    print(f"{result['missed'].text} See tensorboard --logdir {options.run_dir}")


if __name__ == "__main__":
    main()
