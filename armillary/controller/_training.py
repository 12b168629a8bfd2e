"""Trains from loop to loop, past saves and epochs, up to a step or the data's end."""

from collections.abc import Callable
from typing import Any

from armillary._checks import check_positive_int
from armillary.controller._arguments import check_steps_returned
from armillary.controller._progress import log_line
from armillary.controller._saving import Saving
from armillary.controller._start_lines import log_start, repeats_for_ever
from armillary.controller._stop_request import StopRequest
from armillary.controller._train_loops import TrainLoops
from armillary.state._step_counter import StepCounter

_DATA_ENDED = "the data ended, training ends here."
_DATA_ENDED_BEFORE = (
    "the data had ended before, and without `epochs` it is gone through once. Write "
    "how many epochs to train in all: `controller.train(epochs=3)`, or "
    "`controller.train(epochs=epoch + 1)` in a loop over them. For other data, assign "
    "it to `trainer.train_dataset`."
)


class Training:
    """What one controller trains between two evaluations."""

    def __init__(
        self,
        trainer: Any,
        steps_per_loop: int | Callable[[int], int] | None,
        read_step: StepCounter,
        loops: TrainLoops,
        *,
        saving: Saving,
        stop: StopRequest,
        strategy: Any,
        directories: dict[str, str | None],
    ) -> None:
        self._trainer, self._steps_per_loop = trainer, steps_per_loop
        self._read_step, self._loops = read_step, loops
        self._saving, self._stop = saving, stop
        self._strategy, self._directories = strategy, directories
        self._has_said_start = False

    def begin_epoch(self, epochs: int | None) -> bool:
        """Begins the next pass over the data; returns whether there is one to train."""
        if epochs is None:
            return True
        epoch = self._loops.begin_epoch(epochs)
        if epoch:
            self._say_start()
        said = f"epoch {epoch} of {epochs}"
        done = f"{epochs} of {epochs} epochs are done."
        log_line("train", self._read_step(), said if epoch else done)
        return epoch > 0

    def train_until(self, target: int, epochs: int | None = None) -> bool:
        """Trains up to step `target`, or to the end of the data if that is -1.

        Where one of several epochs ends, the next one is begun. Returns whether
        training may go on after it.
        """
        start = step = self._read_step()
        if step == target:
            log_line("train", step, f"already at step {target}, nothing to train.")
        else:
            self._say_start()
            log_line("train", step, f"training until {self._describe(target)}...")
            self._loops.prepare(self.num_steps_at(step))
        while step != target and not self._stop.is_agreed():
            num_steps = self.num_steps_at(step)
            if target != -1:
                num_steps = min(num_steps, target - step)
            num_loops = self._num_loops_at(step, num_steps, target)
            reached = self._loops.run(step, num_steps, num_loops)
            has_ended = reached == step or (reached - step) % num_steps != 0
            if reached > step and self._saving.is_due(reached):
                self._loops.report()
                is_stop = has_ended or self._stop.reason is not None
                if not self._saving.follows_evaluation(is_stop=is_stop):
                    self._saving.save()
            if has_ended:
                self._loops.report()
                self._loops.finish()
                if epochs is not None:
                    return not self._stop.is_agreed() and self.begin_epoch(epochs)
                message = _DATA_ENDED if reached > start else _DATA_ENDED_BEFORE
                log_line("train", reached, message)
                return False
            step = reached
        self._loops.report()
        self._loops.finish()
        return not self._stop.is_agreed()

    def num_steps_at(self, step: int) -> int:
        """Returns how many steps the loop has that begins at a step."""
        if not callable(self._steps_per_loop):
            return check_positive_int("steps_per_loop", self._steps_per_loop)
        return check_steps_returned(self._steps_per_loop(step), step)

    def _num_loops_at(self, step: int, num_steps: int, target: int) -> int:
        """Returns how many loops of as many steps have nothing to do between them."""
        count, most = 1, self._loops.num_ahead
        if callable(self._steps_per_loop):
            return 1
        while count < most:
            reached = step + count * num_steps
            ends = target != -1 and reached + num_steps > target
            if ends or self._saving.is_due(reached):
                break
            count += 1
        return count

    def _describe(self, target: int) -> str:
        if target != -1:
            return f"step {target}"
        if repeats_for_ever(self._trainer):
            return "a stop is requested: the data never ends, and `steps` is not given"
        return "the data ends"

    def _say_start(self) -> None:
        """Logs what is trained, where, and on what, once."""
        if not self._has_said_start:
            self._has_said_start = True
            log_start(self._trainer, self._strategy, self._directories)
