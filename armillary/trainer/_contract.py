"""The inner loops: what a controller asks of a trainer and of an evaluator.

A `Controller` runs the outer loop and calls these two for many steps at a time.
`StandardTrainer` and `StandardEvaluator` implement them around one compiled step;
derive from the classes here to write an inner loop by hand.
"""

import abc
from collections.abc import Sequence
from typing import Any, NoReturn

from armillary._checks import check_positive_int
from armillary._traceback import hides_frames
from armillary.state._summarize import as_step_counter
from armillary.typing import Output


class PendingLoops:
    """Loops of training that were started. The device may still run them.

    Args:
        outputs: What each loop returned.

    Attributes:
        num_steps: For how many steps there was data, over all loops. `None` if only
            the global step tells.
        may_overlap: Whether the next loops may start before anybody looks at these. A
            trainer written by hand may return arrays that its next call donates.
    """

    num_steps: int | None = None
    may_overlap: bool = False

    def __init__(self, outputs: Sequence[Output] = ()) -> None:
        self._outputs = list(outputs)

    def fetch(self) -> list[Output]:
        """Returns the output of each loop, once the device has run them.

        May be called in another thread than the one that started them.
        """
        return self._outputs

    def check(self, step: int) -> None:
        """Raises what went wrong in a step, if the trainer looks for that.

        Args:
            step: The global step before the loops, for messages.
        """


class AbstractTrainer(abc.ABC):
    """Runs training steps for a `Controller`, many in one call.

    The controller drives it like this::

        while global_step < steps:
            num_steps = min(steps_per_loop, steps - global_step)
            output = trainer.train(num_steps)       # advances the global step
            log(output); write_summaries(output)
            for action in train_actions: action(output)
            save_checkpoint_if_due()

    Attributes:
        data_exhausted: Whether the data ended before the last call of `train` had run
            all its steps. A trainer sets it on each call where that may happen; the
            controller then ends training cleanly at the step reached.
    """

    data_exhausted: bool = False

    @abc.abstractmethod
    def train(self, num_steps: int) -> Output:
        """Runs `num_steps` training steps and advances the global step by as many.

        Args:
            num_steps: Steps to run, at least 1.

        Returns:
            Scalars by name, nested as deep as wanted, or `None`. The controller logs
            them and writes them as summaries.
        """

    def prepare(self, steps_per_loop: int) -> None:
        """Hears, before the first loop, how long loops are. Override as needed.

        Args:
            steps_per_loop: Steps of a loop that nothing shortens.
        """
        del steps_per_loop

    def begin_epoch(self, epochs: int) -> int:
        """Begins the next pass over the data, if the last one has ended.

        The controller calls this where training counts epochs. An override asks the
        data, which alone knows how many passes are done, also after a restore. It
        returns the number of the pass that is to be trained, from 1; 0 if all are done.

        Args:
            epochs: How many passes to train in all, at least 1.

        Raises:
            ValueError: If the trainer cannot count passes, as this one.
        """
        raise ValueError(
            f"`epochs` is {epochs}, but {type(self).__name__} does not say how many "
            "passes over its data are done. Train up to a step "
            "(`controller.train(steps)`), derive the trainer from `StandardTrainer`, "
            "or define `begin_epoch`."
        )

    def start(self, num_steps: int, num_loops: int) -> PendingLoops:
        """Starts loops of training, and returns without waiting where it can.

        The controller calls this, and not `train`. By default it is one call of
        `train`; override it if the device can work on while the host reports.

        Args:
            num_steps: Steps of each loop, at least 1.
            num_loops: Most loops to start, at least 1. Starting fewer is fine. More
                than one is asked for only if nothing has to happen between them.

        Returns:
            The loops that were started, at least one.
        """
        del num_loops
        return PendingLoops([self.train(num_steps)])


class AbstractEvaluator(abc.ABC):
    """Runs an evaluation for a `Controller`.

    The controller drives it like this::

        output = evaluator.evaluate(num_steps)
        log(output); write_summaries(output)
        for action in eval_actions: action(output)
    """

    @abc.abstractmethod
    def evaluate(self, num_steps: int) -> Output:
        """Runs `num_steps` evaluation steps, or all that the data holds.

        Args:
            num_steps: Steps to run, at least 1, or -1 to run until the data ends.

        Returns:
            Scalars by name, nested as deep as wanted, or `None`. The controller logs
            them and writes them as summaries.
        """


class EpochHelper:
    """Tells at the ends of a loop whether an epoch begins or ends, after Orbit's.

    For example, to reset a metric once an epoch, however many loops that is::

        def train_loop_begin(self):
            if self.epochs.epoch_begin():
                self.loss.reset()

        def train_loop_end(self):
            if self.epochs.epoch_end():
                return {"loss": self.loss.compute(), "epoch": self.epochs.current_epoch}

    An epoch ends after the first loop that reaches its last step, so let `epoch_steps`
    be a multiple of `steps_per_loop`; otherwise, epochs end late. A helper saves
    nothing: its place is that of the global step, also after a restart.

    Args:
        epoch_steps: Steps of an epoch.
        global_step: A variable such as `optimizer.step`, or a function without
            arguments, that gives the current step.

    Raises:
        ValueError: If `epoch_steps` is not a positive integer.
        TypeError: If `global_step` is neither a variable nor a function.
    """

    @hides_frames
    def __init__(self, epoch_steps: int, global_step: Any) -> None:
        self._epoch_steps = check_positive_int("epoch_steps", epoch_steps)
        self._read_step = as_step_counter(global_step)
        self._current_epoch: int | None = None
        self._in_epoch = False

    def epoch_begin(self) -> bool:
        """Returns whether an epoch begins here: at the start, or after `epoch_end`."""
        if self._in_epoch:
            return False
        self._current_epoch = self._read_step() // self._epoch_steps
        self._in_epoch = True
        return True

    def epoch_end(self) -> bool:
        """Returns whether the steps of the epoch are done.

        Raises:
            ValueError: If no epoch has begun.
        """
        if not self._in_epoch:
            self._refuse("epoch_end")
        self._in_epoch = self.batch_index < self._epoch_steps
        return not self._in_epoch

    @property
    def batch_index(self) -> int:
        """How many steps of the current epoch are done; it may be past the last one.

        Raises:
            ValueError: If no epoch has ever begun.
        """
        if self._current_epoch is None:
            self._refuse("batch_index")
        return self._read_step() - self._current_epoch * self._epoch_steps

    @property
    def current_epoch(self) -> int | None:
        """Number of the epoch that began last, from 0; `None` before the first."""
        return self._current_epoch

    def _refuse(self, name: str) -> NoReturn:
        raise ValueError(
            f"`{name}` belongs to an epoch, but none has begun. Call `epoch_begin()` "
            "first, as in `train_loop_begin`."
        )
