"""Keras 3 on JAX: `model.fit` with `steps_per_execution`."""

import os
from typing import Any

import numpy as np

from benchmarks.peers._case import Peer, cut_batches, import_peer
from benchmarks.peers._keras_models import make_model
from benchmarks.protocol import Options
from benchmarks.tasks import SEED, Task


class KerasContestant(Peer):
    """One compiled model; a burst is one `fit` of one epoch of so many steps.

    Several devices are `keras.distribution.DataParallel` over virtual CPU devices. The
    loss is the mean of all steps.
    """

    library = "keras"
    tasks = (*Peer.tasks, "many-leaves")

    def _build(self, task: Task, options: Options) -> dict[str, Any]:
        os.environ["KERAS_BACKEND"] = "jax"
        jax = import_peer("jax", "keras")
        if options.devices > 1 and jax.config.jax_platforms in (None, "", "cpu"):
            jax.config.update("jax_num_cpu_devices", options.devices)
        keras: Any = import_peer("keras", "keras")
        if options.devices > 1:
            devices = keras.distribution.list_devices()[: options.devices]
            keras.distribution.set_distribution(
                keras.distribution.DataParallel(devices=devices)
            )
        keras.utils.set_random_seed(SEED)
        self._model = make_model(keras, task)
        self._model.compile(
            optimizer=make_optimizer(keras, task),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=options.steps_per_loop,
        )
        self._batches = _make_batches(keras, task)
        return {
            "input": "PyDataset of batches cut in advance",
            "jit_compile": bool(self._model.jit_compile),
            "parameters": self._model.count_params(),
        }

    def run(self, num_steps: int) -> float:
        import jax

        history = self._model.fit(
            self._batches, steps_per_epoch=num_steps, epochs=1, shuffle=False, verbose=0
        )
        jax.block_until_ready([v.value for v in self._model.trainable_variables])
        return float(history.history["loss"][-1])


def make_optimizer(keras: Any, task: Task) -> Any:
    if task.optimizer == "adamw":
        return keras.optimizers.AdamW(
            task.learning_rate, weight_decay=task.weight_decay, epsilon=1e-8
        )
    return keras.optimizers.Adam(task.learning_rate, epsilon=1e-8)


def _make_batches(keras: Any, task: Task) -> Any:
    arrays = cut_batches(task)
    labels = arrays.pop("label")
    random = np.random.default_rng(SEED)

    class Batches(keras.utils.PyDataset):
        """Endless batches; each epoch has an order of its own."""

        num_batches = None

        def __getitem__(self, index: int) -> Any:
            epoch_index = index % len(labels)
            if epoch_index == 0:
                self._order = random.permutation(len(labels))
            chosen = self._order[epoch_index]
            inputs = {name: array[chosen] for name, array in arrays.items()}
            if len(inputs) == 1:
                inputs = inputs["image"]
            return inputs, labels[chosen]

    return Batches()
