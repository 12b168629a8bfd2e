"""Trains from loop to loop, past saves and epochs, up to a step or the data's end.

Whether a run is to stop: asked for in one process, agreed between all of them.

Runs one loop of training after another, and reports each one.

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

from armillary._checks import check_positive_int
from armillary._logging import logger
from armillary._records import find_numbers
from armillary.cluster._join import expire_boundary, get_peers
from armillary.controller._arguments import check_steps_returned
from armillary.controller._reports import Curves, LoopReport, format_output, log_line
from armillary.controller._run_record import log_start, repeats_for_ever
from armillary.controller._saving import Saving
from armillary.goodput._journal import Recorder
from armillary.goodput._stopwatch import Category
from armillary.state._summarize import StepCounter
from armillary.state._walk import Walk
from armillary.trainer._contract import AbstractTrainer
from armillary.typing import Action


class StopRequest:
    """The request to end the call of a controller that is in progress.

    Attributes:
        reason: Why to stop, or `None` while this process knows of no request.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._is_agreed = False
        self._asked_at = -1

    def clear(self) -> None:
        """Forgets the request: a new call begins."""
        self.reason = None
        self._is_agreed = False
        expire_boundary()

    def make(self, reason: str) -> None:
        """Requests a stop; of several requests the first counts."""
        if not isinstance(reason, str):
            raise TypeError(
                f"`reason` is {reason!r} of type {type(reason).__name__}, but it must "
                'be a string for the log. Use `request_stop("the loss diverged")`.'
            )
        # No lock and no logging: a signal handler may interrupt either.
        if self.reason is None:
            self.reason = reason

    def is_agreed(self) -> bool:
        """Returns whether any process requested a stop; all of them must ask.

        Between two loops, the answer stays what it was when it was asked for first.
        """
        peers = get_peers()
        if peers is None:
            return self.reason is not None
        boundary = peers.boundary
        if not self._is_agreed and self._asked_at != boundary.num_expired:
            self._asked_at = boundary.num_expired
            said = boundary.take(self._say) or boundary.exchange(
                "whether to stop", self._say
            )
            for index, reason in reversed(list(enumerate(said))):
                if reason:
                    at = f"(requested in process {index} of {peers.count})"
                    self.reason = f"{reason[0]} {at}"
                    self._is_agreed = True
        return self._is_agreed

    def _say(self) -> list[str]:
        """Returns the reason, if there is one, for the other processes."""
        return [] if self.reason is None else [self.reason]

    def log(self, read_step: Callable[[], int]) -> None:
        """Logs the reason, if there is one, and the global step that was reached."""
        if self.reason is not None:
            logger.info("stopped at step %d: %s", read_step(), self.reason)


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
