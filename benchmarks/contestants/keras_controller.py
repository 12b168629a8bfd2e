"""A compiled Keras model under a `Controller`, compared with Keras' own `fit`."""

import os
from typing import Any

import jax
import numpy as np

import armillary
from benchmarks.contestants.controller import (
    ControllerContestant,
    capture_log,
    make_strategy,
)
from benchmarks.contestants.environment import prepare
from benchmarks.contestants.functional import SEED
from benchmarks.contestants.rows import SHUFFLE_SEED
from benchmarks.peers._keras_models import make_model
from benchmarks.peers.keras import make_optimizer
from benchmarks.protocol import Options, UnsupportedError
from benchmarks.tasks import Task


class KerasControllerContestant(ControllerContestant):
    """`armillary.keras.KerasTrainer`, with the model that the peer `keras` fits."""

    def setup(self, task: Task, options: Options) -> None:
        """Builds model, data and controller.

        Raises:
            UnsupportedError: For other data or dtypes.
        """
        if options.data != "memory" or options.dtype != "f32":
            raise UnsupportedError(
                f"`data` is {options.data!r} and `dtype` {options.dtype!r}, but "
                "`armillary-keras` has data in memory and f32 only. Leave it out."
            )
        prepare(options)
        os.environ["KERAS_BACKEND"] = "jax"
        import keras

        self._log = capture_log()
        strategy = make_strategy(options.devices)
        arrays = dict(task.make_arrays())
        labels = arrays.pop("label")
        inputs = arrays["image"] if len(arrays) == 1 else arrays
        data = armillary.data.from_arrays(
            (inputs, np.asarray(labels)),
            batch_size=task.batch_size,
            shuffle_seed=SHUFFLE_SEED,
            repeat=True,
        )
        keras.utils.set_random_seed(SEED)
        with strategy.scope():
            self.model: Any = make_model(keras, task)
            self.model.compile(
                optimizer=make_optimizer(keras, task),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
            self.trainer: Any = armillary.keras.KerasTrainer(self.model, data)
        self.controller = armillary.Controller(
            trainer=self.trainer,
            global_step=self.model.optimizer.iterations,
            strategy=strategy,
            steps_per_loop=options.steps_per_loop,
        )
        self.facts = {"parameters": self.model.count_params()}
        self.num_parameters = len(self.model.trainable_variables)
        self._num_steps = 0

    def run(self, num_steps: int) -> float:
        """Runs steps; returns the mean loss of the last loop."""
        self._log.lines.clear()
        self._num_steps += num_steps
        self.controller.train(self._num_steps, checkpoint_at_completion=False)
        variables = self.model.trainable_variables
        jax.block_until_ready([variable.value for variable in variables])
        return float(self.model.get_metrics_result()["loss"])
