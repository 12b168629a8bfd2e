"""The program of the tutorial: handwritten digits, on all devices of a job.

The data are the 1,797 images that come with scikit-learn. In one process it trains on
all devices; the launcher, or a scheduler, starts several. Run it again, and it resumes.

    armillary launch --workers 2 --devices-per-worker 2 examples/tutorial.py
"""

import sys

import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

import armillary

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Trainer(armillary.StandardTrainer):
    """Trains a model; each loop reports its mean loss."""

    def __init__(self, dataset, strategy, model) -> None:
        super().__init__(dataset)
        self.strategy, self.model = strategy, model
        self.optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
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

    def __init__(self, dataset, strategy, model) -> None:
        super().__init__(dataset)
        self.strategy, self.model = strategy, model
        self.accuracy = nnx.metrics.Accuracy()

    def eval_begin(self) -> None:
        self.accuracy.reset()

    def eval_step(self, iterator) -> None:
        self.strategy.run(self.replica_step, args=(next(iterator),))

    def replica_step(self, batch) -> None:
        self.accuracy.update(logits=self.model(batch["image"]), labels=batch["label"])

    def eval_end(self) -> dict:
        return {"accuracy": self.accuracy.compute()}


def main(run_dir: str = "runs/tutorial") -> None:
    strategy = armillary.MultiWorkerMirroredStrategy()
    images, labels = load_digits(return_X_y=True)
    digits = {"image": images.astype("float32") / 16, "label": labels.astype("int32")}
    train = armillary.data.from_arrays(
        {name: values[:1437] for name, values in digits.items()},
        batch_size=64,
        shuffle_seed=0,
        repeat=True,
    )
    test = armillary.data.from_arrays(
        {name: values[1437:] for name, values in digits.items()}, batch_size=64
    )
    train_dataset = strategy.distribute_dataset(train)
    with strategy.scope():
        model = nnx.Linear(64, 10, rngs=nnx.Rngs(0))
        trainer = Trainer(train_dataset, strategy, model)
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer),
        f"{run_dir}/checkpoints",
        checkpoint_interval=100,
    )
    controller = armillary.Controller(
        trainer=trainer,
        evaluator=Evaluator(strategy.distribute_dataset(test), strategy, model),
        global_step=trainer.optimizer.step,
        strategy=strategy,
        steps_per_loop=100,
        summary_dir=f"{run_dir}/train",
        eval_summary_dir=f"{run_dir}/eval",
        checkpoint_manager=manager,
    )
    result = controller.train_and_evaluate(train_steps=1000, eval_interval=500)
    print(f"Test accuracy {result['accuracy']:.2%}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
