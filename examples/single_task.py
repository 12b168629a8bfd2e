"""Trains and evaluates any model that has one output, after Orbit's `single_task`.

`SingleTaskTrainer` and `SingleTaskEvaluator` take the model, the loss, the metrics and
the name of the labels as arguments. `main` uses them for the 150 irises that come with
scikit-learn.

    python examples/single_task.py --devices 2

It prints the accuracy on 30 test flowers, about 97%.
"""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_iris
from sklearn.model_selection import train_test_split

import armillary


class SingleTaskTrainer(armillary.StandardTrainer):
    """Trains a model with one output on batches that are dictionaries.

    Make it in the scope of the strategy that it is to use.

    Args:
        train_dataset: A dataset whose batches are dictionaries.
        label_key: The entry of a batch that holds the labels. The model is called with
            a dictionary of the other entries.
        model: The model to train.
        loss_fn: Function of the model's output and the labels that returns one loss for
            each example.
        optimizer: The optimizer of the model.
        metrics: Reported for each loop next to `training_loss`. Their `update` gets the
            losses as `loss`, the model's output as `logits` and as `predictions`, and
            the labels as `labels` and as `targets`. Each metric uses the arguments that
            it has.
        options: As for any `StandardTrainer`.
    """

    def __init__(
        self,
        train_dataset,
        label_key: str,
        *,
        model: Callable[[dict], jax.Array],
        loss_fn: Callable[[jax.Array, jax.Array], jax.Array],
        optimizer: nnx.Optimizer,
        metrics: nnx.MultiMetric | None = None,
        options: armillary.StandardTrainerOptions | None = None,
    ) -> None:
        super().__init__(train_dataset, options)
        self.label_key = label_key
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.metrics = metrics or nnx.MultiMetric()
        self.training_loss = nnx.metrics.Average("loss")
        self.strategy = armillary.get_strategy()

    def train_loop_begin(self) -> None:
        self.training_loss.reset()
        self.metrics.reset()

    def train_step(self, iterator) -> None:
        def step_fn(batch):
            labels = batch.pop(self.label_key)

            def loss_fn(model):
                outputs = model(batch)
                losses = self.loss_fn(outputs, labels)
                return jnp.mean(losses), (losses, outputs)

            gradients, (losses, outputs) = nnx.grad(loss_fn, has_aux=True)(self.model)
            gradients = armillary.all_reduce("mean", gradients)
            self.optimizer.update(self.model, gradients)
            self.training_loss.update(loss=losses)
            update_metrics(self.metrics, outputs, labels, loss=losses)

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self) -> dict:
        return {"training_loss": self.training_loss.compute(), **self.metrics.compute()}


class SingleTaskEvaluator(armillary.StandardEvaluator):
    """Evaluates a model with one output, counting each example once.

    Make it in the scope of the strategy that it is to use.

    Args:
        eval_dataset: A dataset whose batches are dictionaries.
        label_key: As for `SingleTaskTrainer`.
        model: The model to evaluate. If it has dropout, give a view of it,
            `nnx.view(model, deterministic=True)`. With batch normalization, add
            `use_running_average=True`.
        metrics: As for `SingleTaskTrainer`, without the losses.
        options: As for any `StandardEvaluator`.
    """

    def __init__(
        self,
        eval_dataset,
        label_key: str,
        *,
        model: Callable[[dict], jax.Array],
        metrics: nnx.MultiMetric,
        options: armillary.StandardEvaluatorOptions | None = None,
    ) -> None:
        super().__init__(eval_dataset, options)
        self.label_key = label_key
        self.model = model
        self.metrics = metrics
        self.strategy = armillary.get_strategy()

    def eval_begin(self) -> None:
        self.metrics.reset()

    def eval_step(self, iterator) -> None:
        def step_fn(batch):
            labels = batch.pop(self.label_key)
            update_metrics(self.metrics, self.model(batch), labels)

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self) -> dict:
        return self.metrics.compute()


def update_metrics(metrics, outputs, labels, **others) -> None:
    """Updates metrics of classes (`logits`, `labels`) and of numbers alike."""
    metrics.update(
        logits=outputs, labels=labels, predictions=outputs, targets=labels, **others
    )


class Classifier(nnx.Module):
    """Two dense layers, for four measurements of a flower."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(4, 32, rngs=rngs)
        self.output = nnx.Linear(32, 3, rngs=rngs)

    def __call__(self, inputs: dict) -> jax.Array:
        """Returns logits of shape `(batch, 3)`."""
        return self.output(nnx.relu(self.hidden(inputs["features"])))


def load_data() -> tuple[dict, dict]:
    """Returns 120 flowers to train on and 30 to test with."""
    features, labels = load_iris(return_X_y=True)
    features, test_features, labels, test_labels = train_test_split(
        features.astype("float32"),
        labels.astype("int32"),
        test_size=30,
        stratify=labels,
        random_state=0,
    )
    test = {"features": test_features, "label": test_labels}
    return {"features": features, "label": labels}, test


def main() -> None:
    parser = argparse.ArgumentParser(description="Classifies irises.")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    train, test = load_data()
    train_data = armillary.data.from_arrays(
        train, batch_size=32, shuffle_seed=0, repeat=True
    )
    test_data = armillary.data.from_arrays(test, batch_size=32)
    strategy = armillary.MirroredStrategy()
    with strategy.scope():
        model = Classifier(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        trainer = SingleTaskTrainer(
            train_data,
            "label",
            model=model,
            loss_fn=optax.softmax_cross_entropy_with_integer_labels,
            optimizer=optimizer,
            metrics=nnx.MultiMetric(accuracy=nnx.metrics.Accuracy()),
        )
        evaluator = SingleTaskEvaluator(
            test_data,
            "label",
            model=model,
            metrics=nnx.MultiMetric(accuracy=nnx.metrics.Accuracy()),
        )
    controller = armillary.Controller(
        trainer=trainer,
        evaluator=evaluator,
        global_step=optimizer.step,
        strategy=strategy,
        steps_per_loop=100,
    )
    result = controller.train_and_evaluate(train_steps=options.steps)
    print(f"Test accuracy {result['accuracy']:.2%}")


if __name__ == "__main__":
    main()
