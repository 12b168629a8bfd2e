"""TensorFlow with Orbit: `Controller`, `StandardTrainer` and a `tf.while_loop`."""

import os
from typing import Any

from benchmarks.peers._case import Peer, cut_batches, import_peer
from benchmarks.peers._keras_models import make_model
from benchmarks.protocol import Options
from benchmarks.tasks import SEED, Task


class OrbitContestant(Peer):
    """A trainer as Orbit's examples have it; a burst trains some loops further.

    Several devices are a `MirroredStrategy` over virtual CPUs. The loss is the mean of
    the last loop.
    """

    library = "orbit"

    def _build(self, task: Task, options: Options) -> dict[str, Any]:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        tf: Any = import_peer("tensorflow", "orbit")
        tf_keras: Any = import_peer("tf_keras", "orbit")
        orbit: Any = import_peer("orbit", "orbit")
        tf_keras.utils.set_random_seed(SEED)
        strategy = _make_strategy(tf, options.devices)
        with strategy.scope():
            model = make_model(tf_keras, task)
            optimizer = _make_optimizer(tf_keras, task)
            optimizer.build(model.trainable_variables)
        dataset = _make_dataset(tf, task)
        # A distributed dataset costs a third of the steps/s of `mlp`, and one device
        # needs none: Orbit takes the dataset itself too.
        if options.devices > 1:
            dataset = strategy.experimental_distribute_dataset(dataset)
        trainer = _make_trainer(strategy, model, optimizer, dataset, task)
        self._losses: list[float] = []
        self._controller = orbit.Controller(
            global_step=optimizer.iterations,
            trainer=trainer,
            strategy=strategy,
            steps_per_loop=options.steps_per_loop,
            train_actions=[lambda output: self._losses.append(float(output["loss"]))],
        )
        return {
            "input": "tf.data over batches cut in advance",
            "tf_keras": tf_keras.__version__,
            "strategy": type(strategy).__name__,
            "parameters": model.count_params(),
        }

    def run(self, num_steps: int) -> float:
        done = int(self._controller.global_step.numpy())
        # Orbit reads the global step after each loop, which waits for the loop's end.
        self._controller.train(done + num_steps, checkpoint_at_completion=False)
        loss = self._losses[-1]
        self._losses.clear()
        return loss


def _make_strategy(tf: Any, devices: int) -> Any:
    if tf.config.list_physical_devices("GPU"):
        names = [f"/gpu:{index}" for index in range(devices)]
    else:
        names = [f"/cpu:{index}" for index in range(devices)]
    if devices == 1:
        return tf.distribute.OneDeviceStrategy(names[0])
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration() for _ in range(devices)],
    )
    return tf.distribute.MirroredStrategy(names)


def _make_optimizer(tf_keras: Any, task: Task) -> Any:
    if task.optimizer == "adamw":
        return tf_keras.optimizers.AdamW(
            task.learning_rate, weight_decay=task.weight_decay, epsilon=1e-8
        )
    return tf_keras.optimizers.Adam(task.learning_rate, epsilon=1e-8)


def _make_dataset(tf: Any, task: Task) -> Any:
    """Returns endless batches; each epoch has an order of its own.

    Only the order goes through the shuffle buffer: with the batches in it, every epoch
    would start by copying all of them.
    """
    arrays = {name: tf.constant(array) for name, array in cut_batches(task).items()}
    num_batches = len(arrays["label"])
    order = tf.data.Dataset.range(num_batches).shuffle(num_batches, seed=SEED)

    def take(index: Any) -> Any:
        return {name: array[index] for name, array in arrays.items()}

    batches = order.repeat().map(take, num_parallel_calls=tf.data.AUTOTUNE)
    return batches.prefetch(tf.data.AUTOTUNE)


def _make_trainer(
    strategy: Any, model: Any, optimizer: Any, dataset: Any, task: Task
) -> Any:
    tf: Any = import_peer("tensorflow", "orbit")
    tf_keras: Any = import_peer("tf_keras", "orbit")
    orbit: Any = import_peer("orbit", "orbit")

    class Trainer(orbit.StandardTrainer):
        """The single-task trainer of Orbit's examples, for one of our tasks."""

        def __init__(self) -> None:
            super().__init__(
                dataset, options=orbit.StandardTrainerOptions(use_tf_while_loop=True)
            )
            with strategy.scope():
                self._loss = tf_keras.metrics.Mean("loss")

        def train_loop_begin(self) -> None:
            self._loss.reset_state()

        def train_step(self, iterator: Any) -> None:
            strategy.run(self._train_replica, args=(next(iterator),))

        def train_loop_end(self) -> dict[str, Any]:
            return {"loss": self._loss.result()}

        def _train_replica(self, batch: Any) -> None:
            inputs = {name: batch[name] for name in batch if name != "label"}
            if len(inputs) == 1:
                inputs = inputs["image"]
            with tf.GradientTape() as tape:
                logits = model(inputs, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    labels=batch["label"], logits=logits
                )
                loss = tf.reduce_sum(losses) / task.batch_size
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(
                zip(gradients, model.trainable_variables, strict=True)
            )
            self._loss.update_state(tf.reduce_mean(losses))

    return Trainer()
