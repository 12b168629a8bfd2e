"""Epochs of a number of steps, where a loop is not an epoch."""

from typing import Any, NoReturn

from armillary._checks import check_positive_int
from armillary._traceback import hides_frames
from armillary.state._summarize import as_step_counter


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
