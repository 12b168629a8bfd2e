"""Runs one loop of training after another, and reports each one.

A report is a log line, summaries, and the train actions, in this order. It waits for
the loop's output, so where it can wait itself, it comes when the next loop has begun.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from armillary._logging import logger
from armillary._loop_report import LoopReport, can_wait, start_loop
from armillary._progress import find_non_finite, format_output, log_line
from armillary._typing import Action
from armillary.goodput import Category, Recorder
from armillary.state import StepCounter
from armillary.summary import NoopSummaryManager, SummaryManager


class TrainLoops:
    """The loops of one controller.

    Args:
        trainer: Runs the steps; may be `None` if no loop is run.
        read_step: Returns the global step.
        scope: Returns what is entered around the trainer and the actions.
        goodput: Accounts for the time.
        summary_manager: Writes the output of loops.
        summary_interval: Steps between summaries; `None` writes them after each loop.
        actions: Called with the output of each loop.
    """

    def __init__(
        self,
        trainer: Any,
        read_step: StepCounter,
        scope: Callable[[], AbstractContextManager[Any]],
        goodput: Recorder,
        *,
        summary_manager: SummaryManager | NoopSummaryManager,
        summary_interval: int | None,
        actions: tuple[Action, ...],
    ) -> None:
        self._trainer, self._read_step = trainer, read_step
        self._scope, self._goodput = scope, goodput
        self._summary_manager = summary_manager
        self._summary_interval = summary_interval
        self._actions = actions
        # Loops that were started, and are not yet reported.
        self._pending: deque[LoopReport] = deque()
        self._last_end = 0.0
        self._is_warned = False
        self._executor = ThreadPoolExecutor(1, "armillary-report")
        weakref.finalize(self, self._executor.shutdown, wait=False)

    def run(self, step: int, num_steps: int, full_steps: int) -> int:
        """Runs one loop from `step` on; returns the global step it reaches.

        A loop is shortened where something else is due; `full_steps` is what it would
        have else.
        """
        start = time.perf_counter()
        with self._goodput.phase(Category.STEPPING), self._scope():
            started = start_loop(self._trainer, num_steps, full_steps)
        loop = LoopReport(
            self._trainer,
            step,
            num_steps,
            started,
            self._read_step,
            start,
            self._executor,
        )
        self._goodput.run_on_device(Category.STEPPING, loop.ended)
        self._pending.append(loop)
        # The first loop is looked at before a second one runs, and so is every loop if
        # actions need its output.
        if self._last_end == 0 or self._actions or not can_wait(self._trainer):
            self.report()
        else:
            self.report(but=1)
        return loop.reached

    def report(self, but: int = 0) -> None:
        """Waits for the loops that are not yet reported, and reports them.

        Args:
            but: How many of them are left out, the last ones.
        """
        while len(self._pending) > but:
            self._report_first()

    def _report_first(self) -> None:
        loop = self._pending[0]
        try:
            with self._goodput.phase(Category.STEPPING):
                output, steps_per_second, self._last_end = loop.fetch(self._last_end)
        except Exception:
            self._pending.clear()  # What was started after it has no effect.
            raise
        self._pending.popleft()  # Not before: Ctrl-C leaves it to be reported.
        self._goodput.mark("loop", loop.reached)
        if loop.reached == loop.step:
            return  # The data had ended before: there is nothing to report.
        log_line(
            "train",
            loop.reached,
            f"steps/sec: {steps_per_second: 6.1f}",
            f"output: {format_output(output)}",
        )
        self._warn_once(loop.reached, find_non_finite(output))
        # A loop may start anywhere after a restore, so what counts is passing a
        # multiple of the interval, not ending on one.
        interval = self._summary_interval
        if interval is None or loop.reached // interval > loop.step // interval:
            values = {**output, "steps_per_second": steps_per_second}
            self._summary_manager.write_summaries(values, step=loop.reached)
            self._summary_manager.flush()
        with self._scope():
            for action in self._actions:
                action(output)

    def _warn_once(self, step: int, bad: dict[str, Any]) -> None:
        if not bad or self._is_warned:
            return
        self._is_warned = True
        shown = ", ".join(f"`{path}` is {float(value)}" for path, value in bad.items())
        logger.warning(
            "At step %d, %s. To find the first such step, and the operation that made "
            "the value, start again with `StandardTrainerOptions(on_non_finite="
            '"raise")`. Frequent causes: a learning rate that is too high, the '
            "logarithm of 0 or a division by it, and labels that are not among the "
            "classes (negative, or as many as there are or more).",
            step,
            shown,
        )
