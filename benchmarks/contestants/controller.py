"""Armillary as a user writes it: a `Controller` around a `StandardTrainer`."""

import atexit
import logging
import shutil
import tempfile
from typing import Any

import jax
import optax
from flax import nnx

import armillary
from benchmarks.contestants import SAVE_INTERVAL
from benchmarks.contestants.environment import prepare
from benchmarks.contestants.functional import (
    DTYPES,
    SEED,
    make_functional,
    make_optimizer,
)
from benchmarks.contestants.rows import SHUFFLE_SEED, make_grain_dataset
from benchmarks.models import make_model
from benchmarks.protocol import Options, UnsupportedError
from benchmarks.tasks import Task

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Trainer(armillary.StandardTrainer):
    """Runs the training steps; each loop reports its mean loss."""

    def __init__(
        self,
        dataset: Any,
        strategy: armillary.distribute.Strategy,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
    ) -> None:
        super().__init__(dataset)
        self.strategy, self.model, self.optimizer = strategy, model, optimizer
        self.loss = nnx.metrics.Average("loss")

    def train_loop_begin(self) -> None:
        """Resets the loss."""
        self.loss.reset()

    def train_step(self, iterator: Any) -> None:
        """Runs one step."""

        def step_fn(batch: dict[str, jax.Array]) -> None:
            def loss_fn(model: Any) -> jax.Array:
                logits = model(batch).astype("float32")
                losses = cross_entropy(logits, batch["label"])
                if losses.ndim > 1:  # a loss for each word
                    losses = losses.mean(axis=1)
                return armillary.compute_average_loss(losses)

            loss, gradients = nnx.value_and_grad(loss_fn)(self.model)
            gradients = armillary.all_reduce("sum", gradients)
            self.optimizer.update(self.model, gradients)
            self.loss.update(loss=loss * self.strategy.num_replicas_in_sync)

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self) -> dict[str, jax.Array]:
        """Returns the mean loss."""
        return {"loss": self.loss.compute()}


class ControllerContestant:
    """Armillary's `Controller`, without checkpoints or summaries."""

    def setup(self, task: Task, options: Options) -> None:
        """Builds model, optimizer, data and controller."""
        prepare(options)
        self.facts: dict[str, Any] = {}
        self._log = capture_log()
        strategy = make_strategy(options.devices)
        self.dataset = make_dataset(task, options, strategy)
        with strategy.scope():
            self.model = make_model(task, nnx.Rngs(SEED), DTYPES[options.dtype])
            self.optimizer = nnx.Optimizer(
                self.model, make_optimizer(task), wrt=nnx.Param
            )
        self.trainer = Trainer(self.dataset, strategy, self.model, self.optimizer)
        self.controller = armillary.Controller(
            trainer=self.trainer,
            global_step=self.optimizer.step,
            strategy=strategy,
            steps_per_loop=options.steps_per_loop,
            checkpoint_manager=self.make_checkpoint_manager(),
        )
        self.num_parameters = len(jax.tree.leaves(nnx.state(self.model, nnx.Param)))
        self._num_steps = 0

    def make_checkpoint_manager(self) -> armillary.CheckpointManager | None:
        """Returns none; `armillary-saving` has one."""
        return None

    def run(self, num_steps: int) -> float:
        """Runs steps; returns the mean loss of the last loop."""
        self._log.lines.clear()
        self._num_steps += num_steps
        self.controller.train(self._num_steps, checkpoint_at_completion=False)
        # The loss is an output of the last program: with it, the state is there too.
        return float(self.trainer.loss.compute())

    def save(self, folder: str) -> None:
        """Writes a checkpoint to its end, with the position in the data."""
        self.make_checkpoint().write(folder)

    def restore(self, folder: str) -> None:
        """Restores what `save` wrote."""
        self.make_checkpoint().restore(folder)
        self._num_steps = int(self.optimizer.step[...])

    def make_checkpoint(self) -> armillary.Checkpoint:
        """Returns a checkpoint of everything that changes."""
        return armillary.Checkpoint(
            model=self.model, optimizer=self.optimizer, train_dataset=self.dataset
        )


class SavingContestant(ControllerContestant):
    """As `armillary`, with a checkpoint every 100 steps, written in the background."""

    def make_checkpoint_manager(self) -> armillary.CheckpointManager:
        """Returns a manager of a folder that goes away with the process."""
        folder = tempfile.mkdtemp(prefix="armillary-bench-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return armillary.CheckpointManager(
            self.make_checkpoint(),
            folder,
            max_to_keep=2,
            checkpoint_interval=SAVE_INTERVAL,
        )


class StepContestant(ControllerContestant):
    """Armillary's `StepTrainer` around the step of the references."""

    def setup(self, task: Task, options: Options) -> None:
        """Builds state, data and controller.

        Raises:
            UnsupportedError: On several devices: the step of the references has no
                reduction.
        """
        prepare(options)
        if options.devices > 1:
            raise UnsupportedError("The step of the references has no reduction.")
        self.facts: dict[str, Any] = {}
        self._log = capture_log()
        strategy = make_strategy(1)
        functional = make_functional(task, options.dtype)

        def step(state: Any, batch: Any) -> Any:
            state, loss = functional.step(state, batch)
            return state, {"loss": loss}

        self.trainer = armillary.StepTrainer(
            step,
            functional.state,
            make_dataset(task, options, strategy),
            strategy=strategy,
        )
        self.controller = armillary.Controller(
            trainer=self.trainer,
            global_step=self.trainer.global_step,
            strategy=strategy,
            steps_per_loop=options.steps_per_loop,
        )
        self.num_parameters = len(functional.state[0])
        self._num_steps = 0

    def run(self, num_steps: int) -> float:
        """Runs steps; returns the mean loss of the last loop."""
        self._log.lines.clear()
        self._num_steps += num_steps
        history = self.controller.train(self._num_steps)
        return float(history["loss"][-1])


def make_strategy(devices: int) -> armillary.distribute.Strategy:
    """Returns the strategy of a number of devices."""
    if devices == 1:
        return armillary.OneDeviceStrategy(jax.devices()[0])
    return armillary.MirroredStrategy(jax.devices()[:devices])


def make_dataset(
    task: Task, options: Options, strategy: armillary.distribute.Strategy
) -> Any:
    """Returns the distributed dataset of a case."""
    if options.data == "grain":
        return strategy.distribute_dataset(make_grain_dataset(task))
    data = armillary.data.from_arrays(
        task.make_arrays(),
        batch_size=task.batch_size,
        shuffle_seed=SHUFFLE_SEED,
        repeat=True,
    )
    is_resident = options.data == "resident"
    input_options = armillary.data.InputOptions(place_on_device=is_resident)
    return strategy.distribute_dataset(data, input_options)


class LogCapture(logging.Handler):
    """Keeps the lines that a terminal would show, so that they cost what they cost."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Formats and keeps a line."""
        self.lines.append(self.format(record))


def capture_log() -> LogCapture:
    """Makes Armillary log to memory only."""
    capture = LogCapture()
    logger = logging.getLogger("armillary")
    logger.handlers[:] = [capture]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return capture
