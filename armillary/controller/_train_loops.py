"""Runs one loop of training after another, and reports each one.

A report is a log line, summaries, and the train actions, in this order. It waits for
the loop's output, so where it can wait itself, it comes when the next loop has begun.

Where nothing has to happen between loops, the trainer is asked for several at once, so
many that they take a moment. How many, no result depends on.
"""

import functools
import math
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from armillary._logging import logger
from armillary._numbers import find_numbers
from armillary.cluster._join import expire_boundary, get_peers
from armillary.controller._curves import Curves
from armillary.controller._loop_report import LoopReport
from armillary.controller._progress import format_output, log_line
from armillary.goodput._category import Category
from armillary.goodput._recorder import Recorder
from armillary.state._step_counter import StepCounter
from armillary.state._walk import Walk
from armillary.trainer._contract import AbstractTrainer
from armillary.typing import Action

# How long the device runs loops that are started together. As long as nobody minds
# that a log line or a request to stop waits.
_SECONDS_AHEAD = 0.25
_MOST_AHEAD = 100


class TrainLoops:
    """The loops of one controller, for which a trainer may be `None` if no loop is run.

    `note` is called with the step, the steps per second and the scalars of each loop.
    """

    def __init__(
        self,
        trainer: Any,
        read_step: StepCounter,
        scope: Callable[[], AbstractContextManager[Any]],
        goodput: Recorder,
        *,
        curves: Curves,
        summary_interval: int | None,
        log_interval: int | None,
        note: Callable[[int, float, dict[str, float]], None],
        actions: tuple[Action, ...],
    ) -> None:
        self._trainer, self._read_step = trainer, read_step
        self._scope, self._goodput = scope, goodput
        self._curves = curves
        self._summary_interval, self._log_interval = summary_interval, log_interval
        # Since the last log line: steps, seconds, and the last loop.
        self._unlogged_steps, self._unlogged_seconds = 0, 0.0
        self._unlogged: tuple[int, dict[str, Any]] | None = None
        self._note, self._actions = note, actions
        # Loops that were started, and outputs that came of them, not yet reported.
        self._pending: deque[LoopReport] = deque()
        self._outputs: deque[Callable[[], None]] = deque()
        self._last_end = 0.0
        self._seconds_per_loop = float("inf")
        self._is_warned, self._is_silent = False, False
        self._executor = ThreadPoolExecutor(1, "armillary-report")
        weakref.finalize(self, self._executor.shutdown, wait=False)

    @property
    def num_ahead(self) -> int:
        """How many loops may be started together, for all that is known here."""
        # All processes would have to know as much of the time, and an action may look
        # at the state.
        if self._actions or get_peers() is not None:
            return 1
        seconds = max(self._seconds_per_loop, _SECONDS_AHEAD / _MOST_AHEAD)
        return max(1, int(_SECONDS_AHEAD / seconds))

    def prepare(self, steps_per_loop: int) -> None:
        """Tells the trainer how long loops are that nothing shortens."""
        with self._scope():
            _method(self._trainer, "prepare")(steps_per_loop)

    def begin_epoch(self, epochs: int) -> int:
        """Lets the trainer begin its next pass; see `AbstractTrainer.begin_epoch`."""
        with self._scope():
            return _method(self._trainer, "begin_epoch")(epochs)

    def run(self, step: int, num_steps: int, num_loops: int) -> int:
        """Runs one to `num_loops` loops; returns the global step that they reach."""
        with self._goodput.phase(Category.STEPPING):
            return self._run(step, num_steps, num_loops)

    def _run(self, step: int, num_steps: int, num_loops: int) -> int:
        start, compiled = time.perf_counter(), self._goodput.compile_seconds
        # Traces show the loops by this name, and the step at which each begins.
        with self._scope(), jax.profiler.StepTraceAnnotation("train", step_num=step):
            started = _method(self._trainer, "start")(num_steps, num_loops)
        # The device waited for its program.
        compiling = self._goodput.compile_seconds - compiled
        start = min(start + compiling, time.perf_counter())
        loops = LoopReport(
            self._trainer,
            step,
            num_steps,
            started,
            self._read_step,
            start=start,
            executor=self._executor,
        )
        self._pending.append(loops)
        expire_boundary()
        # The first loop is looked at before a second one runs, and so is every loop if
        # actions need its output.
        if self._last_end == 0 or self._actions or not started.may_overlap:
            self.report()
        else:
            self.report(but=1)
        return loops.reached

    def report(self, but: int = 0) -> None:
        """Reports all but the last `but` of the loops that were not; waits for them."""
        self._report_outputs()
        while len(self._pending) > but:
            self._fetch_first()
            self._report_outputs()

    def _report_outputs(self) -> None:
        while self._outputs:
            # What begins while the device runs steps hides behind them.
            is_hidden = self._pending and self._pending[-1].is_running
            category = Category.STEPPING if is_hidden else Category.OTHER
            with self._goodput.phase(category):
                self._outputs.popleft()()

    def _fetch_first(self) -> None:
        loops = self._pending[0]
        try:
            with self._goodput.phase(Category.STEPPING):
                outputs, speed, self._last_end = loops.fetch(self._last_end)
        except Exception:
            self._pending.clear()  # What was started after it has no effect.
            raise
        self._seconds_per_loop = loops.seconds_per_loop
        self._goodput.mark("loop", loops.reached)
        reports: list[Callable[[], None]] = []
        step = loops.step
        for reached, output in outputs:
            # At the same step, the data had ended before: there is nothing to report.
            if reached > step:
                one = functools.partial(self._report_one, step, reached, output, speed)
                reports.append(one)
            step = reached
        # Not before: Ctrl-C leaves it to be reported.
        self._outputs.extend([*reports, self._curves.flush])
        self._pending.popleft()

    def _report_one(
        self, step: int, reached: int, output: dict[str, Any], speed: float
    ) -> None:
        scalars = find_numbers(output)
        self._is_silent = not scalars
        self._note(reached, speed, scalars)
        self._unlogged_steps += reached - step
        self._unlogged_seconds += (reached - step) / speed
        self._unlogged = reached, output
        if _passes(self._log_interval, step, reached):
            self.log_last()
        self._warn_once(reached, scalars)
        if _passes(self._summary_interval, step, reached):
            self._curves.write_loop(reached, output, scalars, speed)
        if self._actions:
            with self._scope():
                for action in self._actions:
                    expire_boundary()
                    action(output)

    def log_last(self) -> None:
        """Logs the last loop that was reported, unless that was done."""
        if self._unlogged is None:
            return
        reached, output = self._unlogged
        mean_speed = self._unlogged_steps / self._unlogged_seconds
        self._unlogged, self._unlogged_steps, self._unlogged_seconds = None, 0, 0.0
        log_line(
            "train",
            reached,
            f"steps/sec: {mean_speed: 6.1f}",
            f"output: {format_output(output)}",
        )

    def finish(self) -> None:
        """Logs the last loop, and warns of bad values that no output shows."""
        self.log_last()
        if not self._is_silent or self._is_warned:
            return
        slots = Walk([(self._trainer, "")]).slots.values()
        if any(_is_bad(array) for slot in slots for array in slot.read()):
            self._is_warned = True
            logger.warning(
                "The trainer's state has values that are not finite, and no output "
                "shows it. Return the loss from `train_loop_end`, and start again with "
                '`StandardTrainerOptions(on_non_finite="raise")` to find the step.'
            )

    def _warn_once(self, step: int, scalars: dict[str, float]) -> None:
        bad = {name: each for name, each in scalars.items() if not math.isfinite(each)}
        if not bad or self._is_warned:
            return
        self._is_warned = True
        shown = ", ".join(f"`{name}` is {each}" for name, each in bad.items())
        logger.warning(
            "At step %d, %s. To find the first such step, and the operation that made "
            "the value, start again with `StandardTrainerOptions(on_non_finite="
            '"raise")`. Frequent causes: a learning rate that is too high, the '
            "logarithm of 0 or a division by it, and labels that are not among the "
            "classes (negative, or as many as there are or more). If no step made it, "
            "`train_loop_end` did, as from a metric that no step has updated.",
            step,
            shown,
        )


def _is_bad(array: jax.Array) -> bool:
    """Returns whether an array that this process has whole holds an infinity or NaN."""
    if not (array.is_fully_addressable and jnp.issubdtype(array.dtype, jnp.inexact)):
        return False
    return not np.isfinite(jax.device_get(array)).all()


def _passes(interval: int | None, step: int, reached: int) -> bool:
    """Returns whether a loop passes a multiple of an interval.

    A loop may start anywhere after a restore, so it need not end on one.
    """
    return interval is None or reached // interval > step // interval


def _method(trainer: Any, name: str) -> Callable[..., Any]:
    """Returns a method that has a default, for a trainer of whatever class."""
    default = functools.partial(getattr(AbstractTrainer, name), trainer)
    return getattr(trainer, name, default)
