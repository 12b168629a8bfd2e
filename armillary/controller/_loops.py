"""Trains loop after loop, with saves and epochs, up to a step or the end of the data.

To read the loss of a loop is to wait for the device. So the next loops are started
first, if possible, and a thread waits for the outputs. If nothing is due between loops,
the trainer starts several loops in one call, enough to keep the device busy for a
moment.
"""

import contextlib
import math
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import jax

from armillary._checks import check_positive_int
from armillary._json_values import find_numbers
from armillary._launcher import notify_launcher
from armillary._logging import logger
from armillary._stack import with_room
from armillary.cluster._join import expire_boundary, get_peers
from armillary.controller._display import Display
from armillary.controller._history import add_record
from armillary.controller._outputs import fetch_output, format_output, log_line
from armillary.controller._run import Run, call_actions, is_reached
from armillary.controller._saving import Saving
from armillary.controller._speeds import Speeds
from armillary.controller._stragglers import Stragglers
from armillary.errors import GlobalStepError
from armillary.goodput._stopwatch import Category
from armillary.lifeline._lifeline import waiting
from armillary.trainer._contract import PendingLoops
from armillary.trainer._standard_trainer import StandardTrainer
from armillary.trainer._work import Work

# The time that the device takes for loops that are started together. It is short, so
# that log lines and requests to stop are not late.
_SECONDS_AHEAD = 0.25
_MAX_AHEAD = 100
# The speed in a log line is a mean over at least this time, because the speed of a
# shorter time varies by chance.
_SPEED_SECONDS = 0.1
_ENDED_BEFORE = "the data had ended before. Use `train(epochs=epoch + 1)` to continue."
_ENDED_EARLY = (
    "the data ended, training ends here, before step {}. To train on, make the data "
    "with `repeat=True`, or count passes: `epochs=...`."
)


_LoopOutput: TypeAlias = tuple[int, int, dict[str, Any]]
"""The global step before a loop, the step after it, and its output."""


class LoopRunner:
    """Runs the training loops of a controller between two evaluations."""

    def __init__(
        self, run: Run, saving: Saving, display: Display, speeds: Speeds
    ) -> None:
        self._run = run
        self._saving = saving
        self._display = display

        # The steps and seconds since the last log line, and the last loop.
        self._steps = 0
        self._seconds = 0.0
        self._last: tuple[int, dict[str, Any], Work] | None = None
        self._speeds = speeds
        # The steps and seconds of earlier lines.
        self._lines: deque[tuple[int, float]] = deque(maxlen=1000)
        self._is_warned = False
        self._stragglers = Stragglers(run)

        # Loops that were started, and outputs that are not yet reported.
        self._pending: deque[AwaitedLoops] = deque()
        self._reports: deque[_LoopReport] = deque()
        self._last_end = 0.0
        # Unknown at first, so a single loop is started.
        self._seconds_per_loop = float("inf")
        # Log text of the epoch that begins next; empty once it is logged.
        self._epoch = ""
        # Whether `train(n)` advances the global step by `n`; `None` until the first
        # loop has shown it.
        method = getattr(type(run.trainer), "train", None)
        is_standard = method is StandardTrainer.train
        self._counts_steps: bool | None = True if is_standard else None

        self._executor = ThreadPoolExecutor(1, "armillary-report")
        weakref.finalize(self, self._executor.shutdown, wait=False)

    def begin_epoch(self, epochs: int | None) -> bool:
        """Begins the next pass over the data; returns whether a pass is left."""
        if epochs is None:
            return True
        with self._run.scope():
            epoch = self._run.trainer.begin_epoch(epochs)
        if epoch:
            self._display.log_start()
            self._epoch = f"epoch {epoch} of {epochs}"
        else:
            done = f"{epochs} of {epochs} epochs are done."
            log_line("train", self._run.read_step(), done)
        return epoch > 0

    @with_room
    def train_until(self, target: int, epochs: int | None = None) -> bool:
        """Trains to step `target`, or -1 for the end of the data.

        Returns:
            Whether training may continue.
        """
        stop = self._run.stop
        start = step = self._run.read_step()
        if self._epoch:  # Only now, after the log line of the last evaluation.
            log_line("train", step, self._epoch)
            self._epoch = ""
        if is_reached(step, target):
            log_line("train", step, f"already at step {step}, nothing to train.")
        elif not stop.is_agreed():  # A run that was stopped early trains nothing.
            self._begin(step, target)

        while not (is_reached(step, target) or stop.is_agreed()):
            self._stragglers.check(step)
            is_due = self._saving.is_snapshot_due()
            # If the first loop fails, the launcher blames the checkpoint that was
            # restored. A snapshot of the same values would have another name.
            if is_due and self._saving.has_trained:
                self.report()
                self._saving.save_to_memory()

            num_steps = self.num_steps_at(step)
            if target != -1:
                num_steps = min(num_steps, target - step)
            num_loops = self._num_loops_at(step, num_steps, target)
            reached, has_ended = self._start(step, num_steps, num_loops)

            if reached > step and self._saving.is_due(reached):
                self.report()
                self._saving.save()
            if has_ended:
                self._finish()
                if epochs is not None:
                    return not stop.is_agreed() and self.begin_epoch(epochs)
                _log_end_of_data(reached, target, has_trained=reached > start)
                return False
            step = reached
        self._finish()
        return not stop.is_agreed()

    def _begin(self, step: int, target: int) -> None:
        """Logs the target, and prepares the trainer for loops up to it."""
        self._display.log_start()
        data = getattr(self._run.trainer, "train_dataset", None)
        end = f"step {target}" if target != -1 else "the data ends"
        if target == -1 and getattr(data, "is_endless", False):
            end = "it is stopped: the data has no end"
        log_line("train", step, f"training until {end}...")
        with self._run.scope():
            self._run.trainer.prepare(self.num_steps_at(step))

    def may_pass_target(self) -> bool:
        """Returns whether the trainer may train past its target step."""
        return self._counts_steps is not True

    def num_steps_at(self, step: int) -> int:
        """Returns the number of steps in the loop that begins at a step."""
        num_steps = self._run.steps_per_loop
        if callable(num_steps):
            num_steps = num_steps(step)
        return check_positive_int("steps_per_loop", num_steps)

    def _num_loops_at(self, step: int, num_steps: int, target: int) -> int:
        """Returns the number of loops to start together, if nothing is due between."""
        # Several processes would have to agree, and an action may read the state.
        is_alone = not self._run.train_actions and get_peers().is_alone
        if callable(self._run.steps_per_loop) or not is_alone:
            return 1
        seconds = max(self._seconds_per_loop, _SECONDS_AHEAD / _MAX_AHEAD)
        most = max(1, int(_SECONDS_AHEAD / seconds))
        for count in range(1, most):
            reached = step + count * num_steps
            ends = target != -1 and reached + num_steps > target
            if ends or self._saving.is_due(reached):
                return count
        return most

    def _start(self, step: int, num_steps: int, num_loops: int) -> tuple[int, bool]:
        """Starts one to `num_loops` loops.

        Returns:
            The global step that they reach, and whether the data ends there.
        """
        goodput = self._run.goodput
        with goodput.phase(Category.STEPPING):
            start = time.perf_counter()
            compiled = goodput.compile_seconds
            # Profiles show the loops under this name, with the step of the first loop.
            with (
                self._run.scope(),
                jax.profiler.StepTraceAnnotation("train", step_num=step),
            ):
                started = self._run.trainer.start(num_steps, num_loops)
                self._saving.warn_of_lost_positions()
            if self._speeds.note_program(started.work, started.footprint):
                logger.info("%s", self._speeds.describe_device())
            # The device waited for its program, so this time does not count.
            start += goodput.compile_seconds - compiled
            start = min(start, time.perf_counter())
            loops = AwaitedLoops(
                self._run, started, step, num_steps, start, self._executor
            )
            self._pending.append(loops)
            expire_boundary()
            # The first loop is reported before a second loop runs. If actions need the
            # outputs, every loop is.
            is_first = self._last_end == 0 or self._run.train_actions
            overlaps = started.may_overlap and not is_first
            self.report(num_to_keep=1 if overlaps else 0)
        # Only now, because some trainers show only by the global step how far they got.
        return loops.reached, loops.has_ended

    def report(self, *, num_to_keep: int = 0) -> None:
        """Waits for pending loops, and reports them, except the last `num_to_keep`."""
        self._report_fetched()
        while len(self._pending) > num_to_keep:
            self._fetch_first()
            self._report_fetched()

    def _report_fetched(self) -> None:
        while self._reports:
            # Work that begins while the device runs steps costs no time of its own.
            is_hidden = self._pending and not self._pending[-1].outcome.done()
            category = Category.STEPPING if is_hidden else Category.OTHER
            with (
                self._run.goodput.phase(category),
                waiting() if is_hidden else contextlib.nullcontext(),
            ):
                self._report_loop(self._reports.popleft())
                if not self._reports:
                    self._run.curves.flush()

    def _report_loop(self, report: "_LoopReport") -> None:
        run = self._run
        step, reached, output, speed, work = report
        scalars = find_numbers(output)
        notify_launcher("trained")
        self._display.note(reached, speed, scalars)
        add_record(run.history, reached, scalars)
        self._steps += reached - step
        self._seconds += (reached - step) / speed
        self._last = reached, output, work
        if _passes(run.log_interval, step, reached):
            self._log_last()
        self._warn_once(reached, scalars)
        if _passes(run.summary_interval, step, reached):
            speeds = self._speeds.compute(work, speed)
            # An output may have a number of its own, such as `mfu`.
            values = {**speeds, **output, "steps_per_second": speed}
            fields = {"steps_per_second": speed, **speeds}
            fields |= self._speeds.take_record()
            run.curves.write("train", reached, values, **fields, values=scalars)
        if run.train_actions:
            with run.scope():
                call_actions(run.train_actions, output)

    def _log_last(self) -> None:
        """Logs the last loop, unless it was logged already."""
        if self._last is None:
            return
        reached, output, work = self._last

        lines = self._lines
        lines.append((self._steps, self._seconds))
        steps, seconds = map(sum, zip(*lines, strict=True))
        while len(lines) > 1 and seconds - lines[0][1] >= _SPEED_SECONDS:
            old_steps, old_seconds = lines.popleft()
            steps -= old_steps
            seconds -= old_seconds

        self._last = None
        self._steps = 0
        self._seconds = 0.0
        speed = steps / seconds
        parts = [f"steps/sec: {speed: 6.1f}", *self._speeds.describe(work, speed)]
        log_line("train", reached, *parts, f"output: {format_output(output)}")

    def _warn_once(self, step: int, scalars: dict[str, float]) -> None:
        bad = {
            name: value for name, value in scalars.items() if not math.isfinite(value)
        }
        if not bad or self._is_warned:
            return
        self._is_warned = True
        shown = ", ".join(f"`{name}` is {value}" for name, value in bad.items())
        logger.warning(
            f"At step {step}, {shown}. To find the first such step, and the operation "
            "that made the value, start again with `StandardTrainerOptions("
            'on_non_finite="raise")`. If no step made it, `train_loop_end` did: for '
            "example, from a metric that no step has updated."
        )

    def _fetch_first(self) -> None:
        """Waits for the loops that were started first, and queues their outputs."""
        loops = self._pending[0]
        try:
            with self._run.goodput.phase(Category.STEPPING), waiting():
                outputs, seconds, self._last_end = loops.fetch(self._last_end)
        except Exception:
            self._pending.clear()  # The loops that were started later have no effect.
            raise
        self._saving.has_trained = True
        reached = outputs[-1][1]
        if loops.is_counted_by_trainer:
            self._note_advance(loops, reached - loops.step, len(outputs))
        self._seconds_per_loop = seconds / len(outputs)
        self._run.goodput.mark("loop", reached)
        speed = (reached - loops.step) / seconds
        for step, after, output in outputs:
            # A loop that did not advance has nothing to report: the data had ended
            # before.
            if after > step:
                self._reports.append(
                    _LoopReport(step, after, output, speed, loops.work)
                )
        # ORDER: last, so that after Ctrl-C the loop is still reported.
        self._pending.popleft()

    def _note_advance(
        self, loops: "AwaitedLoops", advance: int, num_loops: int
    ) -> None:
        """Warns once if `train(n)` of a trainer does not advance by `n` steps."""
        is_exact = advance == loops.num_asked * num_loops
        if not is_exact and self._counts_steps is not False:
            trainer = type(self._run.trainer).__name__
            logger.warning(
                f"`{trainer}.train({loops.num_asked})` advances the global step by "
                f"{advance}. So `steps_per_loop` counts units of `{trainer}.train`, "
                "but all other numbers of steps count the global step. Training may "
                "end, and evaluations may begin, up to a loop later than asked. If a "
                "loop ended because of its data, set `self.data_exhausted = True`."
            )
        self._counts_steps = is_exact

    def _finish(self) -> None:
        self.report()
        self._log_last()


def _log_end_of_data(step: int, target: int, *, has_trained: bool) -> None:
    """Logs that the data has ended, before or after the first step of this call."""
    text = "the data ended, training ends here."
    if not has_trained:
        text = _ENDED_BEFORE
    elif target > step:
        text = _ENDED_EARLY.format(target)
    log_line("train", step, text)


def _passes(interval: int | None, step: int, reached: int) -> bool:
    """Returns whether a loop passes a multiple of an interval."""
    return interval is None or reached // interval > step // interval


class _LoopReport(NamedTuple):
    """A loop that has ended, with what is logged about it."""

    step: int
    reached: int
    output: dict[str, Any]
    speed: float
    """Steps per second."""
    work: Work
    """The mean work of a step."""


class AwaitedLoops:
    """Loops that were started together, and take the step from `step` to `reached`."""

    def __init__(
        self,
        run: Run,
        started: PendingLoops,
        step: int,
        num_asked: int,
        started_at: float,
        executor: ThreadPoolExecutor,
    ) -> None:
        self.step = step
        self.num_asked = num_asked
        self._started_at = started_at
        self._loops = started
        self._data_ended = run.trainer.data_exhausted
        read_step = run.read_step.snapshot()

        def wait() -> tuple[list[dict[str, Any]], int, float]:
            fetched = [
                fetch_output(output, "trainer.train") for output in started.fetch()
            ]
            return fetched, read_step(), time.perf_counter()

        self.outcome = executor.submit(wait)
        self._trainer = type(run.trainer).__name__
        if started.num_steps is not None:
            self.reached = step + started.num_steps
        else:
            self.reached = read_step() if self._data_ended else step + num_asked

    @property
    def is_counted_by_trainer(self) -> bool:
        """True if only the global step shows how many steps the trainer has run."""
        return self._loops.num_steps is None and not self._data_ended

    @property
    def work(self) -> Work:
        """The mean work of a step."""
        return self._loops.work

    @property
    def has_ended(self) -> bool:
        """True if the data ended together with these loops."""
        num_run = self._loops.num_steps
        if num_run is None:
            return self._data_ended
        return num_run == 0 or num_run % self.num_asked != 0

    def fetch(self, last_end: float) -> tuple[list[_LoopOutput], float, float]:
        """Waits for the loops; returns their outputs, their seconds, and their end."""
        outputs, reached, end = self.outcome.result()
        self._loops.check(self.step)
        count = len(outputs)
        self._check_step(reached, self.num_asked * count)

        if self._loops.num_steps is not None:
            ends = [self.step + n * self.num_asked for n in range(1, count)]
        else:
            advance = reached - self.step
            ends = [self.step + n * advance // count for n in range(1, count)]
        ends.append(reached)
        starts = [self.step, *ends[:-1]]
        self.reached = reached

        pairs = zip(starts, ends, outputs, strict=True)
        return list(pairs), end - max(self._started_at, last_end), end

    def _check_step(self, reached: int, num_asked: int) -> None:
        """Raises if the global step does not match the steps that have run."""
        num_run = self._loops.num_steps
        if num_run is None and not self._loops.may_overlap:
            self._check_advance(reached, num_asked)
            return
        if num_run is None:
            num_run = num_asked
            if self._data_ended:
                num_run = min(max(0, reached - self.step), num_asked)
        if reached != self.step + num_run:
            why = "its data ended, and it must" if num_run < num_asked else "it must"
            raise GlobalStepError(
                f"`trainer.train({num_asked})` advanced `global_step` from "
                f"{self.step} to {reached}, but {why} advance it by {num_run}, to "
                f"{self.step + num_run}. Pass a counter that every step advances by "
                "one, such as `global_step=optimizer.step`. If a step makes several "
                "updates, count steps by `armillary.create_global_step()`. A trainer "
                "whose data ended early must set `self.data_exhausted = True`."
            )

    def _check_advance(self, reached: int, num_asked: int) -> None:
        """Raises if a trainer that defines its own steps leaves the global step."""
        has_advanced = reached > self.step
        may_stay = reached == self.step and self._data_ended
        if not (has_advanced or may_stay):
            raise GlobalStepError(
                f"`{self._trainer}.train({num_asked})` took `global_step` from "
                f"{self.step} to {reached}, but every call must advance it. Otherwise, "
                "training would never end. Pass a counter that the trainer advances as "
                "`global_step`, such as `optimizer.step`. A trainer whose data ended "
                "must set `self.data_exhausted = True`."
            )
