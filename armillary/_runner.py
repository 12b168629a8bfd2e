"""The inner loops: what a controller asks of a trainer and of an evaluator.

A `Controller` runs the outer loop and calls these two for many steps at a time.
`StandardTrainer` and `StandardEvaluator` implement them around one compiled step;
derive from the classes here to write an inner loop by hand.
"""

import abc

from armillary._typing import Output


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
