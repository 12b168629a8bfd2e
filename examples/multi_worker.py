"""Trains on handwritten digits in several processes that share each batch.

This is the program at the end of the tutorial. The data are the 1,797 images that come
with scikit-learn. In one process, it trains on all devices of the process. A launcher
or a scheduler starts several processes, with the same numbers. Run it again, with any
number of processes, and it continues from the last checkpoint.

    armillary launch --workers 2 --devices-per-worker 2 \
        examples/multi_worker.py --run-dir runs/multi_worker

It prints the loss of each 100 steps, and the accuracy on the test images, about 90%.

With `--evaluator` in front of the script, one more process evaluates every checkpoint.
Put `--only-train` behind the script then. Otherwise, the workers would also evaluate.
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

import armillary

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Trainer(armillary.StandardTrainer):
    """Runs the training steps; each loop reports its mean loss."""

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
        self.loss = nnx.metrics.Average("loss")

    def train_loop_begin(self) -> None:
        self.loss.reset()

    def train_step(self, iterator) -> None:
        def step_fn(batch):
            def loss_fn(model):
                losses = cross_entropy(model(batch["image"]), batch["label"])
                return jnp.mean(losses), losses

            gradients, losses = nnx.grad(loss_fn, has_aux=True)(self.model)
            gradients = armillary.all_reduce("mean", gradients)
            self.optimizer.update(self.model, gradients)
            self.loss.update(loss=losses)

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self) -> dict:
        return {"loss": self.loss.compute()}


class Evaluator(armillary.StandardEvaluator):
    """Reports the accuracy over all test images, each counted once."""

    def __init__(
        self,
        dataset: armillary.data.DistributedDataset,
        strategy: armillary.distribute.Strategy,
        model: nnx.Linear,
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.model = model
        self.accuracy = nnx.metrics.Accuracy()

    def eval_begin(self) -> None:
        self.accuracy.reset()

    def eval_step(self, iterator) -> None:
        def step_fn(batch):
            logits = self.model(batch["image"])
            self.accuracy.update(logits=logits, labels=batch["label"])

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self) -> dict:
        return {"accuracy": self.accuracy.compute()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on digits, in a cluster.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/multi_worker"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--only-train",
        action="store_true",
        help="leave evaluation to `armillary launch --evaluator`",
    )
    options = parser.parse_args()

    # Create it before anything uses a device: it joins the processes.
    strategy = armillary.MultiWorkerMirroredStrategy()

    images, labels = load_digits(return_X_y=True)
    data = {"image": images.astype("float32") / 16.0, "label": labels.astype("int32")}
    train = {name: values[:1437] for name, values in data.items()}
    test = {name: values[1437:] for name, values in data.items()}
    train_dataset = strategy.distribute_dataset(
        armillary.data.from_arrays(train, batch_size=64, shuffle_seed=0, repeat=True)
    )
    test_dataset = strategy.distribute_dataset(
        armillary.data.from_arrays(test, batch_size=64)
    )
    with strategy.scope():
        model = nnx.Linear(64, 10, rngs=nnx.Rngs(0))  # the same seed in every process
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    trainer = Trainer(train_dataset, strategy, model, optimizer)
    checkpoint_manager = armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer),
        options.run_dir / "checkpoints",
        checkpoint_interval=100,
    )
    # After SIGTERM to any process, all save the same step and exit with code 77.
    save_if_preempted = armillary.actions.SaveCheckpointIfPreempted(checkpoint_manager)
    controller = armillary.Controller(
        trainer=trainer,
        evaluator=Evaluator(test_dataset, strategy, model),
        global_step=optimizer.step,
        strategy=strategy,
        steps_per_loop=100,
        train_actions=[save_if_preempted],
        summary_dir=options.run_dir / "train",
        eval_summary_dir=options.run_dir / "eval",
        checkpoint_manager=checkpoint_manager,
    )
    if strategy.cluster_resolver.task_type == "evaluator":
        save_if_preempted.close()  # It has nothing to save.
        result = controller.evaluate_continuously(until_step=options.steps)
    elif options.only_train:
        controller.train(options.steps)
        return
    else:
        result = controller.train_and_evaluate(
            train_steps=options.steps, eval_interval=500
        )
    print(f"Test accuracy {result['accuracy']:.2%}")


if __name__ == "__main__":
    main()
