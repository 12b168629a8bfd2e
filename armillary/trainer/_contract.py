"""The inner loops: what a controller asks of a trainer and of an evaluator.

`StandardTrainer` and `StandardEvaluator` implement them around one compiled step;
derive from the classes here to write an inner loop by hand.
"""

import abc
from collections.abc import Sequence

from armillary.typing import Output


class PendingLoops:
    """Loops of training that were started. The device may still run them.

    Args:
        outputs: The output of each loop.

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

        As in Orbit, a trainer may give `num_steps` another meaning, such as epochs.
        Then `steps_per_loop` of the controller counts these, and all other numbers of
        steps count the global step. The controller logs a warning once.

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
