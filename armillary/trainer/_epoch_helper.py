"""Epochs of a fixed number of steps, for trainers whose loop is not an epoch."""

from typing import Any

from armillary._checks import check_positive_int
from armillary._traceback import hides_frames
from armillary.state._step_counter import as_step_counter


class EpochHelper:
    """Finds in the hooks of a trainer if an epoch begins or ends (Orbit's helper).

    For example, this resets a metric once per epoch, for any number of loops::

        def train_loop_begin(self):
            if self.epochs.epoch_begin():
                self.loss.reset()

        def train_loop_end(self):
            if self.epochs.epoch_end():
                return {"loss": self.loss.compute(), "epoch": self.epochs.current_epoch}

    An epoch ends after the first loop that reaches its last step. To end epochs on
    time, make `epoch_steps` a multiple of `steps_per_loop`. A helper has no state in
    checkpoints, because it computes its place from the global step, also after a
    restart.

    Args:
        epoch_steps: Steps of one epoch.
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
        self._is_in_epoch = False

    def epoch_begin(self) -> bool:
        """Returns whether an epoch begins.

        One does at the start, after `epoch_end`, and after a restore of a step before
        the current epoch.
        """
        if self._is_in_epoch and self.batch_index >= 0:
            return False
        self._current_epoch = self._read_step() // self._epoch_steps
        self._is_in_epoch = True
        return True

    def epoch_end(self) -> bool:
        """Returns whether all steps of the current epoch are done.

        Raises:
            ValueError: If no epoch has begun.
        """
        if not self._is_in_epoch:
            raise _no_epoch("epoch_end()")
        self._is_in_epoch = self.batch_index < self._epoch_steps
        return not self._is_in_epoch

    @property
    def batch_index(self) -> int:
        """The steps of the current epoch that are done.

        Raises:
            ValueError: If no epoch has ever begun.
        """
        if self._current_epoch is None:
            raise _no_epoch("batch_index")
        return self._read_step() - self._current_epoch * self._epoch_steps

    @property
    def current_epoch(self) -> int | None:
        """The number of the epoch that began last, from 0; `None` before the first."""
        return self._current_epoch


def _no_epoch(name: str) -> ValueError:
    return ValueError(
        f"`{name}` of `EpochHelper` needs an epoch, but none has begun. Call "
        "`epoch_begin()` first, for example in `train_loop_begin`."
    )
