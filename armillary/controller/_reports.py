"""Reports of loops and evaluations: log lines, summaries, curves, and actions."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from armillary._logging import logger
from armillary._records import find_numbers
from armillary.cluster._join import expire_boundary
from armillary.controller._outputs import (
    add_record,
    fetch_output,
    format_output,
    log_line,
)
from armillary.controller._run import Run
from armillary.goodput._stopwatch import Category
from armillary.state._walk import Walk
from armillary.typing import Action


class LoopReports:
    """Reports the loops of training of one controller, one after the other."""

    def __init__(
        self, run: Run, note: Callable[[int, float, dict[str, float]], None]
    ) -> None:
        self._run, self._note = run, note
        # Since the last log line: steps, seconds, and the last loop.
        self._steps, self._seconds = 0, 0.0
        self._last: tuple[int, dict[str, Any]] | None = None
        self._is_warned = self._is_silent = False

    def add(
        self, step: int, reached: int, output: dict[str, Any], speed: float
    ) -> None:
        """Reports a loop from one step to another, which ran so many steps a second."""
        scalars = find_numbers(output)
        self._is_silent = not scalars
        self._note(reached, speed, scalars)
        add_record(self._run.history, reached, scalars)
        self._steps += reached - step
        self._seconds += (reached - step) / speed
        self._last = reached, output
        if _passes(self._run.log_interval, step, reached):
            self._log()
        self._warn_once(reached, scalars)
        if _passes(self._run.summary_interval, step, reached):
            values = {**output, "steps_per_second": speed}
            self._run.curves.write(
                "train", reached, values, steps_per_second=speed, values=scalars
            )
        if self._run.train_actions:
            with self._run.scope():
                call_actions(self._run.train_actions, output)

    def _log(self) -> None:
        """Logs the last loop, unless that was done."""
        if self._last is None:
            return
        reached, output = self._last
        speed = f"steps/sec: {self._steps / self._seconds: 6.1f}"
        self._last, self._steps, self._seconds = None, 0, 0.0
        log_line("train", reached, speed, f"output: {format_output(output)}")

    def finish(self) -> None:
        """Logs the last loop, and warns of bad values that no output shows."""
        self._log()
        if not self._is_silent or self._is_warned:
            return
        slots = Walk([(self._run.trainer, "")]).slots.values()
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
            "classes. If no step made it, `train_loop_end` did, as from a metric that "
            "no step has updated.",
            step,
            shown,
        )


def _is_bad(array: jax.Array) -> bool:
    """Returns whether an array that this process has whole holds an infinity or NaN."""
    if not (array.is_fully_addressable and jnp.issubdtype(array.dtype, jnp.inexact)):
        return False
    return not np.isfinite(jax.device_get(array)).all()


def _passes(interval: int | None, step: int, reached: int) -> bool:
    """Returns whether a loop, from wherever, passes a multiple of an interval."""
    return interval is None or reached // interval > step // interval


def call_actions(actions: Iterable[Action], output: dict[str, Any]) -> None:
    """Calls actions with an output."""
    for action in actions:
        expire_boundary()
        action(output)


def run_evaluations(
    run: Run, evaluator: Any, num_steps: int, actions: Iterable[Action]
) -> dict[str, Any]:
    """Runs and reports one evaluation, or those that have names, which are nested."""
    step = run.read_step()

    def evaluate(evaluator: Any, name: str) -> dict[str, Any]:
        named = [name] if name else []
        # The data may end before so many steps.
        amount = "complete" if num_steps == -1 else f"up to {num_steps} steps of"
        log_line("eval", step, *named, f"running {amount} evaluation...")
        start = time.perf_counter()
        with run.goodput.phase(Category.EVALUATING):
            with run.scope():
                output = evaluator.evaluate(num_steps)
            output = fetch_output(output, "evaluator.evaluate")
        seconds = time.perf_counter() - start
        expire_boundary()
        run.goodput.mark("evaluation", step)
        took = f"eval time: {seconds: 6.1f} sec"
        log_line("eval", step, *named, took, f"output: {format_output(output)}")
        nested = {name: output} if name else output
        fields = {"name": name, "seconds": seconds, "values": find_numbers(output)}
        run.eval_curves.write("eval", step, nested, **fields)
        run.eval_curves.flush()
        return output

    if isinstance(evaluator, Mapping):
        output = {name: evaluate(each, name) for name, each in evaluator.items()}
    else:
        output = evaluate(evaluator, "")
    with run.scope():
        call_actions(actions, output)
    add_record(run.history.eval, step, find_numbers(output))
    return output
