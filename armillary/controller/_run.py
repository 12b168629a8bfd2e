"""The state that the parts of one controller share."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from armillary._logging import logger
from armillary._rising_clock import RisingClock
from armillary.cluster._join import expire_boundary, get_peers
from armillary.controller._curves import Curves
from armillary.controller._history import History
from armillary.controller._stop_request import StopRequest
from armillary.goodput._journal import make_recorder
from armillary.state._step_counter import as_step_counter
from armillary.typing import Action


def is_reached(step: int, target: int) -> bool:
    """Returns whether a global step is at a target or past it; -1 is not a target."""
    return target != -1 and step >= target


class Run:
    """Shared state of one controller's parts; `directory` holds the checkpoints."""

    def __init__(self, controller: Any, steps_per_loop: Any) -> None:
        self.trainer = controller.trainer
        self.strategy = controller.strategy
        self.steps_per_loop: int | Callable[[int], int] | None = steps_per_loop
        self.log_interval: int | None = controller.log_interval
        self.summary_interval: int | None = controller.summary_interval
        self.train_actions: tuple[Action, ...] = controller.train_actions
        self.eval_actions: tuple[Action, ...] = controller.eval_actions
        directory = getattr(controller.checkpoint_manager, "directory", None)
        self.directory: str | None = directory
        self.read_step = as_step_counter(controller.global_step)
        self.scope: Callable[[], contextlib.AbstractContextManager[Any]] = getattr(
            self.strategy, "scope", contextlib.nullcontext
        )
        self.goodput = make_recorder(None if self.trainer is None else directory)
        clock = RisingClock()
        summaries = controller.summary_manager
        eval_summaries = controller.eval_summary_manager
        self.curves = self.eval_curves = Curves(summaries, directory, clock)
        if eval_summaries is not summaries:
            self.eval_curves = Curves(eval_summaries, directory, clock)
            if self.eval_curves.summary_dir is None:
                # A file of its own would wait for a record "start" of a training.
                self.eval_curves.file = self.curves.file
        self.stop = StopRequest()
        self.history = History()

    def take_history(self) -> History:
        """Returns the history of this call, and begins a new one."""
        history = self.history
        self.history = History()
        return history

    def drop_evaluation(self, step: int) -> None:
        """Makes TensorBoard drop an evaluation of a step that is evaluated again."""
        # In a shared directory, the loop that ends at this step would be lost as well.
        if self.eval_curves.summary_dir != self.curves.summary_dir:
            self.eval_curves.resume_at(step - 1)

    def log_stop(self) -> None:
        if self.stop.reason is not None:
            logger.info("stopped at step %d: %s", self.read_step(), self.stop.reason)


@contextlib.contextmanager
def finishing(
    report: Callable[[], None], *finishes: Callable[[], None]
) -> Iterator[None]:
    """Calls `finishes` after a block, and after an error, which it raises, `report`."""
    try:
        yield
    except BaseException as error:
        cause = get_peers().explain(error)
        for finish in (report, *finishes):
            try:
                finish()
            except Exception as later_error:
                error.add_note(f"Pending writes failed as well: {later_error!r}")
        if cause is not None:
            raise cause from error
        raise
    for finish in finishes:
        finish()


def call_actions(actions: Iterable[Action], output: dict[str, Any]) -> None:
    for action in actions:
        expire_boundary()
        action(output)
