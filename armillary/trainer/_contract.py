"""The inner loops: the methods that a controller calls on trainers and evaluators.

`StandardTrainer` and `StandardEvaluator` implement them around one compiled step. To
write an inner loop by hand, derive from the classes here.
"""

import abc
from collections.abc import Sequence

from armillary.trainer._work import Footprint, Work
from armillary.typing import Output


class PendingLoops:
    """Loops of training that were started. The device may still run them.

    Args:
        outputs: The output of each loop.

    Attributes:
        num_steps: The number of steps that had data, over all loops. `None` if only
            the global step shows it.
        may_overlap: Whether the next loops may start before these outputs are read. By
            default they may not, because a trainer may return arrays that its next call
            donates.
        work: The work of a step, a mean over the loops, if it was counted.
        footprint: The memory that a step needs, if it was measured.
    """

    num_steps: int | None = None
    may_overlap: bool = False
    work: Work = Work()
    footprint: Footprint | None = None

    def __init__(self, outputs: Sequence[Output] = ()) -> None:
        self._outputs = list(outputs)

    def fetch(self) -> list[Output]:
        """Returns the output of each loop, once the device has run them.

        It may be called in a different thread than `start`.
        """
        return self._outputs

    def check(self, step: int) -> None:
        """Raises the error of a bad step, if the trainer checks its steps.

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
            all its steps. If the data of a trainer can end, it sets this in each call.
            The controller then ends training cleanly at the step reached.
    """

    data_exhausted: bool = False

    @abc.abstractmethod
    def train(self, num_steps: int) -> Output:
        """Runs `num_steps` training steps and advances the global step by as many.

        As in Orbit, a trainer may give `num_steps` a different meaning, such as epochs.
        Then `steps_per_loop` of the controller counts epochs, but all other numbers of
        steps count the global step. The controller logs a warning once.

        Args:
            num_steps: Steps to run, at least 1.

        Returns:
            Scalars by name, in nested dictionaries if you like, or `None`. The
            controller logs them and writes them as summaries.
        """

    def prepare(self, steps_per_loop: int) -> None:
        """Receives the length of loops before the first loop. Override as needed.

        Args:
            steps_per_loop: Steps of a full loop. Some loops may be shorter.
        """
        del steps_per_loop

    def begin_epoch(self, epochs: int) -> int:
        """Begins the next pass over the data, if the last one has ended.

        The controller calls this if training counts epochs. An override reads the
        number of completed passes from the data, because the data also counts passes
        from before a restore. It returns the number of the next pass, from 1, or 0 if
        all passes are done.

        Args:
            epochs: The total number of passes to train, at least 1.

        Raises:
            ValueError: If the trainer cannot count passes, like this base class.
        """
        raise ValueError(
            f"`epochs` is {epochs}, but {type(self).__name__} does not count the "
            "passes over its data. Train up to a step "
            "(`controller.train(steps)`), derive the trainer from `StandardTrainer`, "
            "or define `begin_epoch`."
        )

    def start(self, num_steps: int, num_loops: int) -> PendingLoops:
        """Starts loops of training, and returns without waiting if possible.

        The controller calls this method instead of `train`. By default, it calls
        `train` once. Override it if the device can continue while the host reports.

        Args:
            num_steps: Steps of each loop, at least 1.
            num_loops: The largest number of loops to start, at least 1. You may start
                fewer. It is more than 1 only if nothing is due between the loops.

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
        """Runs `num_steps` evaluation steps, or steps until the data ends.

        Args:
            num_steps: Steps to run, at least 1, or -1 to run until the data ends.

        Returns:
            Scalars by name, in nested dictionaries if you like, or `None`. The
            controller logs them and writes them as summaries.
        """
