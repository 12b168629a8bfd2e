"""Fine-tunes BERT to recognize paraphrases, after Orbit's tutorial.

`--data-dir` is a folder with `msr_paraphrase_train.txt` and `msr_paraphrase_test.txt`,
and `--vocabulary` the `vocab.txt` of an uncased BERT. Instead, `--tfrecords` takes a
folder with the files that BERT's own `create_finetuning_data.py` writes.

    python examples/bert_mrpc.py --data-dir ~/mrpc --vocabulary ~/bert/vocab.txt

It prints the accuracy and the F1 score on the test pairs after each epoch. Without
`--pretrained`, the model starts at random, and the 4,076 pairs are too few to learn
much. For the tutorial, add `--preset base --pretrained ~/bert/bert_model.ckpt`.
"""

import argparse
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import armillary
from armillary.errors import CheckpointError
from bert.model import PRESETS, BertClassifier, BertConfig
from bert.mrpc import read_split
from bert.pretrained import load_pretrained
from bert.records import OTHER_NAMES, open_records

Dataset = armillary.data.ArrayDataset | armillary.data.TFRecordDataset
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Trainer(armillary.StandardTrainer):
    """Runs the training steps; each loop reports its mean loss and accuracy."""

    def __init__(
        self,
        dataset: armillary.data.DistributedDataset,
        strategy: armillary.distribute.Strategy,
        model: BertClassifier,
        optimizer: nnx.Optimizer[BertClassifier],
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.model = model
        self.optimizer = optimizer
        self.metrics = nnx.MultiMetric(
            loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy()
        )

    def train_loop_begin(self) -> None:
        self.metrics.reset()

    def train_step(self, iterator) -> None:
        def step_fn(batch):
            def loss_fn(model):
                logits, losses = apply(model, batch)
                return jnp.mean(losses), (losses, logits)

            gradients, (losses, logits) = nnx.grad(loss_fn, has_aux=True)(self.model)
            gradients = armillary.all_reduce("mean", gradients)
            self.optimizer.update(self.model, gradients)
            self.metrics.update(loss=losses, logits=logits, labels=batch["label_ids"])

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self) -> dict:
        return self.metrics.compute()


class Evaluator(armillary.StandardEvaluator):
    """Reports loss, accuracy and F1 over all test pairs, each counted once."""

    def __init__(
        self,
        dataset: armillary.data.DistributedDataset,
        strategy: armillary.distribute.Strategy,
        model: BertClassifier,
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.model = nnx.view(model, deterministic=True)  # without dropout
        self.metrics = nnx.MultiMetric(
            loss=nnx.metrics.Average("loss"),
            accuracy=nnx.metrics.Accuracy(),
            f1=armillary.metrics.F1Score(num_classes=2, average=None),
        )

    def eval_begin(self) -> None:
        self.metrics.reset()

    def eval_step(self, iterator) -> None:
        def step_fn(batch):
            logits, losses = apply(self.model, batch)
            self.metrics.update(loss=losses, logits=logits, labels=batch["label_ids"])

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self) -> dict:
        output = self.metrics.compute()
        return {**output, "f1": output["f1"][1]}  # of the pairs that say the same


def apply(model: BertClassifier, batch: dict) -> tuple[jax.Array, jax.Array]:
    """Returns the logits of a batch and the loss of each of its pairs."""

    def read(name: str) -> jax.Array:
        return batch[name if name in batch else OTHER_NAMES[name]]

    logits = model(read("input_ids"), batch["input_mask"], read("segment_ids"))
    return logits, cross_entropy(logits, batch["label_ids"])


def make_optimizer(
    model: BertClassifier, learning_rate: float, num_steps: int
) -> nnx.Optimizer:
    """Returns AdamW as BERT uses it.

    The learning rate rises from 0 in the first tenth of the steps and falls to 0 in the
    others. Only matrices decay: no bias, and no scale of a layer norm.
    """
    num_rising = num_steps // 10
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, learning_rate, num_rising),
            optax.linear_schedule(learning_rate, 0.0, num_steps - num_rising),
        ],
        [num_rising],
    )
    adamw = optax.adamw(
        schedule,
        eps=1e-6,
        weight_decay=0.01,
        mask=lambda parameters: jax.tree.map(lambda x: x.ndim > 1, parameters),
    )
    transform = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    return nnx.Optimizer(model, transform, wrt=nnx.Param)


def make_controller(
    strategy: armillary.distribute.Strategy,
    train: Dataset,
    test: Dataset,
    config: BertConfig,
    options: argparse.Namespace,
) -> armillary.Controller:
    """Returns the controller of a run, which it has restored if there is one."""
    train_dataset = strategy.distribute_dataset(train)
    steps_per_epoch = count_steps(train)
    with strategy.scope():
        model = BertClassifier(config, nnx.Rngs(options.seed))
        optimizer = make_optimizer(
            model, options.learning_rate, options.epochs * steps_per_epoch
        )

    def start_from_pretrained() -> None:
        print(load_pretrained(options.pretrained, model))

    trainer = Trainer(train_dataset, strategy, model, optimizer)
    return armillary.Controller(
        trainer=trainer,
        evaluator=Evaluator(strategy.distribute_dataset(test), strategy, model),
        global_step=optimizer.step,
        strategy=strategy,
        steps_per_loop=options.steps_per_loop,
        summary_dir=options.run_dir / "train",
        eval_summary_dir=options.run_dir / "eval",
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer),
            options.run_dir / "checkpoints",
            max_to_keep=2,
            checkpoint_interval=steps_per_epoch,
            # Only a run that begins calls it.
            init_fn=start_from_pretrained if options.pretrained else None,
        ),
    )


def count_steps(dataset: Dataset) -> int:
    """Returns how many batches the examples make."""
    return math.ceil(dataset.num_examples / dataset.batch_size)


def load_data(options: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Returns the training data, in another order each epoch, and the test data."""
    for_test = {"batch_size": options.batch_size}
    for_train = {**for_test, "shuffle_seed": options.seed, "repeat": True}
    length = options.max_length
    if options.tfrecords:
        return (
            open_records(options.tfrecords, "train", max_length=length, **for_train),
            open_records(options.tfrecords, "eval", max_length=length, **for_test),
        )
    train, test = (
        read_split(options.data_dir, split, options.vocabulary, length)
        for split in ("train", "test")
    )
    from_arrays = armillary.data.from_arrays
    return from_arrays(train, **for_train), from_arrays(test, **for_test)


def positive_int(text: str) -> int:
    """Returns the number in an argument, or makes `argparse` refuse it."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command line, or of a list."""
    parser = argparse.ArgumentParser(description="Fine-tunes BERT on MRPC.")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data-dir", type=Path, help="folder with the corpus as text")
    data.add_argument("--tfrecords", type=Path, help="folder with it as TFRecord files")
    parser.add_argument("--vocabulary", type=Path, help="vocab.txt, for --data-dir")
    parser.add_argument("--max-length", type=positive_int, default=128, help="tokens")
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument(
        "--pretrained",
        type=Path,
        help="a file *.safetensors, or a checkpoint of TensorFlow",
    )
    parser.add_argument("--run-dir", type=Path, default=Path("runs/bert_mrpc"))
    parser.add_argument("--epochs", type=positive_int, default=3)
    parser.add_argument("--batch-size", type=positive_int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--steps-per-loop", type=positive_int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--devices", type=positive_int, default=2, help="virtual CPU devices"
    )
    options = parser.parse_args(arguments)
    if options.data_dir and not options.vocabulary:
        parser.error("--data-dir needs --vocabulary, the vocab.txt of an uncased BERT")
    longest = PRESETS[options.preset].num_positions
    if not 8 <= options.max_length <= longest:
        parser.error(f"--max-length must be between 8 and {longest}")
    return options


def main() -> None:
    options = parse_arguments()
    try:
        train, test = load_data(options)
        jax.config.update("jax_num_cpu_devices", options.devices)
        strategy = armillary.MirroredStrategy()
        config = PRESETS[options.preset]
        controller = make_controller(strategy, train, test, config, options)
    except (OSError, ValueError, CheckpointError) as error:
        raise SystemExit(f"{error}") from error
    epoch = count_steps(train)
    result = controller.train_and_evaluate(
        train_steps=options.epochs * epoch, eval_interval=epoch
    )
    print(f"Test accuracy {result['accuracy']:.2%}, F1 {result['f1']:.2%}")


if __name__ == "__main__":
    main()
