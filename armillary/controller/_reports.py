"""What loops of training have returned, until somebody looks at it.

A trainer starts its programs and returns before the device has run them. To look at the
loss of a loop is to wait for it, so the controller first starts the next loops, and
looks then: the device always has work. A thread waits from the start, and so knows when
loops have ended: that gives the steps per second.

What a person sees of a run: outputs fetched from the device, and log lines.

Every line starts with the loop and the global step, in the form Orbit's users know::

    train | step:    100 | steps/sec:   52.1 | output: {'loss': 0.41237}
     eval | step:    100 | eval time:    1.3 sec | output: {'accuracy': 0.91406}

What a call of a controller has seen: the scalars of its loops and evaluations.

Where the curves of a controller go: to summaries, and to the file beside them.
"""

import math
import pprint
import time
from array import array
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from armillary._logging import logger
from armillary._records import find_numbers
from armillary.errors import GlobalStepError
from armillary.state._summarize import StepCounter
from armillary.summary._metrics_file import MetricsFile
from armillary.summary._summary_manager import NoopSummaryManager, SummaryManager
from armillary.trainer._contract import AbstractTrainer, PendingLoops

_NUM_DIGITS = 5
_WIDTH = 80


def log_line(loop: str, step: int, *parts: str) -> None:
    """Logs one line about a loop, `"train"` or `"eval"`, at a global step."""
    logger.info("%s", " | ".join((f"{loop:>5}", f"step: {step: 6d}", *parts)))


def fetch_output(output: Any, source: str) -> dict[str, Any]:
    """Returns what a loop returned as plain dictionaries of NumPy values."""
    if output is None:
        return {}
    if not isinstance(output, Mapping):
        raise TypeError(
            f"`{source}` returned {output!r} of type {type(output).__name__}, but it "
            "must return a dictionary of scalars or `None`. Return the value under a "
            'name, such as `{"loss": loss}`.'
        )
    _check_computed(output, source)
    for leaf in jax.tree.leaves(output):
        if isinstance(leaf, jax.Array):
            # All copies start before the first one is waited for.
            leaf.copy_to_host_async()
    return _as_numpy(output)


def _check_computed(output: Mapping[str, Any], source: str) -> None:
    for name, value in output.items():
        if isinstance(value, Mapping):
            _check_computed(value, source)
        elif callable(value) or callable(getattr(value, "compute", None)):
            raise TypeError(
                f"`{source}` returned an object of type {type(value).__name__} as "
                f"{name!r}, but it must return scalars. Call what computes it, such as "
                f'`{{"{name}": self.{name}.compute()}}`.'
            )


def format_scalar(number: float) -> str:
    """Returns a number with few digits."""
    return repr(_Float(number))


def format_output(output: Mapping[str, Any]) -> str:
    """Returns `output` on one line, or indented on several if it does not fit."""
    rounded = _rounded(output)
    text = repr(rounded)
    if len(text) <= _WIDTH and "\n" not in text:
        return text  # As `pprint` would, which takes ten times as long.
    lines = pprint.pformat(rounded, width=_WIDTH, sort_dicts=False).splitlines()
    return "".join(f"\n    {line}" for line in lines)


def _as_numpy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_numpy(item) for name, item in value.items()}
    return jax.tree.map(_fetch_leaf, value)


def _fetch_leaf(leaf: Any) -> Any:
    # Indexing with `()` turns an array without axes into a NumPy scalar.
    return np.asarray(leaf)[()] if isinstance(leaf, jax.Array | np.ndarray) else leaf


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    dtype = getattr(value, "dtype", object)
    if isinstance(value, float) or jnp.issubdtype(dtype, jnp.floating):
        return _Float(value) if np.ndim(value) == 0 else value
    return value.item() if isinstance(value, np.generic) else value


class _Float(float):
    """A float that prints with few digits."""

    def __repr__(self) -> str:
        text = f"{float(self):.{_NUM_DIGITS}g}"
        return f"{text}.0" if text.lstrip("-").isdigit() else text


class Records(Mapping[str, list[float]]):
    """Scalars by name: for each name a list, with one number for each step.

    A number is NaN where its name was missing. Nested outputs have names such as
    `"train/loss"`; what is no scalar is left out.
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}

    @property
    def steps(self) -> list[int]:
        """The global step of each record."""
        return self._steps.tolist()

    def __getitem__(self, name: str) -> list[float]:
        if name not in self._columns:
            known = ", ".join(map(repr, self._columns)) or "nothing"
            raise KeyError(f"{name!r} was not recorded, but {known}")
        column = self._columns[name].tolist()
        return column + [math.nan] * (len(self._steps) - len(column))

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        names = ", ".join(self._columns) or "no scalars"
        return f"{type(self).__name__}({len(self._steps)} records: {names})"


class History(Records):
    """What one call of `train` or `train_and_evaluate` has seen, for reading only.

    ::

        history = controller.train(steps=1000)
        history["loss"]             # one number for each loop ...
        history.steps               # ... at these global steps
        history.eval["accuracy"]    # one number for each evaluation ...
        history.eval.steps          # ... at these

    Attributes:
        eval: The evaluations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.eval = Records()

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}; eval: {self.eval!r})"


def add_record(records: Records, step: int, scalars: Mapping[str, float]) -> None:
    """Adds the scalars of a step."""
    num_before = len(records._steps)
    records._steps.append(step)
    for name, number in scalars.items():
        column = records._columns.setdefault(name, array("d"))
        if len(column) < num_before:
            column.extend([math.nan] * (num_before - len(column)))
        column.append(number)


@jax.tree_util.register_pytree_with_keys_class
class RunOutput(dict[str, Any]):
    """The output of the last evaluation of a run, with the history of the run.

    It is the dictionary that Orbit returns, and equal to one without a history.

    Args:
        output: What the evaluator returned.
        history: What the run has seen.

    Attributes:
        history: As given.
    """

    def __init__(self, output: Mapping[str, Any], history: History) -> None:
        super().__init__(output)
        self.history = history

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        """Returns what a dictionary does: a tree of results holds no history."""
        names = tuple(sorted(self))
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Any) -> dict[str, Any]:
        """Returns a plain dictionary."""
        return dict(zip(names, values, strict=True))


class Curves:
    """The outputs of loops or of evaluations.

    Attributes:
        summary_manager: Writes them as summaries.
        summary_dir: Where, if that is known.
        file: Takes their scalars. It is beside the summaries, or else in `directory`.
    """

    def __init__(
        self, summary_manager: SummaryManager | NoopSummaryManager, directory: Any
    ) -> None:
        self.summary_manager = summary_manager
        self.summary_dir = getattr(summary_manager, "summary_dir", None)
        # Who evaluates the checkpoints of another job writes nothing beside them.
        self.file = (
            MetricsFile(directory, is_of_training=True)
            if self.summary_dir is None
            else MetricsFile(self.summary_dir)
        )

    def write_loop(
        self,
        step: int,
        output: Mapping[str, Any],
        scalars: Mapping[str, float],
        speed: float,
    ) -> None:
        """Writes the output of a loop of training, and the scalars among it."""
        values = {**output, "steps_per_second": speed}
        self.summary_manager.write_summaries(values, step=step)
        self.file.write("train", step, steps_per_second=speed, values=scalars)

    def write_evaluation(
        self, step: int, output: dict[str, Any], *, name: str, seconds: float
    ) -> None:
        """Writes the output of an evaluation, below its name if it has one."""
        named = {name: output} if name else output
        self.summary_manager.write_summaries(named, step=step)
        values = find_numbers(output)
        self.file.write("eval", step, name=name, seconds=seconds, values=values)
        self.flush()

    def flush(self) -> None:
        """Leaves nothing unwritten."""
        self.summary_manager.flush()
        self.file.flush()


class LoopReport:
    """Loops that were started together at a `step`, from the outside.

    Attributes:
        step: The global step before them.
        reached: The global step after them, as far as is known without waiting.
        seconds_per_loop: How long a loop took, once they are fetched.
    """

    def __init__(
        self,
        trainer: AbstractTrainer,
        step: int,
        num_steps: int,
        started: PendingLoops,
        counter: StepCounter,
        *,
        start: float,
        executor: Executor,
    ) -> None:
        self.step, self.seconds_per_loop = step, 0.0
        self._num_steps, self._start = num_steps, start
        self._started = started
        self._data_ended = bool(getattr(trainer, "data_exhausted", False))
        read_step = counter.snapshot()

        def wait() -> tuple[list[dict[str, Any]], int, float]:
            fetched = [
                fetch_output(output, "trainer.train") for output in started.fetch()
            ]
            return fetched, read_step(), time.perf_counter()

        self._outcome = executor.submit(wait)
        if started.num_steps is not None:
            self.reached = step + started.num_steps
        else:
            self.reached = read_step() if self._data_ended else step + num_steps

    @property
    def is_running(self) -> bool:
        """Whether the device still runs them."""
        return not self._outcome.done()

    def fetch(
        self, last_end: float
    ) -> tuple[list[tuple[int, dict[str, Any]]], float, float]:
        """Waits for the loops, and raises what went wrong in them."""
        outputs, reached, end = self._outcome.result()
        self._started.check(self.step)
        self._check_step(reached, len(outputs))
        seconds = end - max(self._start, last_end)
        self.seconds_per_loop = seconds / len(outputs)
        steps = self._steps(reached, len(outputs))
        pairs = list(zip(steps, outputs, strict=True))
        return pairs, (reached - self.step) / seconds, end

    def _steps(self, reached: int, num_loops: int) -> Iterator[int]:
        for number in range(1, num_loops):
            yield self.step + number * self._num_steps
        yield reached

    def _check_step(self, reached: int, num_loops: int) -> None:
        """Raises if the global step is not where the steps that ran have taken it."""
        num_asked = self._num_steps * num_loops
        is_known = self._started.num_steps is not None
        num_run = self._started.num_steps if is_known else num_asked
        assert num_run is not None
        expected = self.step + num_run
        if not is_known and self._data_ended:
            expected = min(max(self.step, reached), expected)
        if reached == expected:
            return
        reason = "it must"
        if num_run < num_asked:
            reason = "its data ended, and it must"
        early = ""
        if not is_known:
            early = (
                "; a trainer whose data ended early must set `self.data_exhausted = "
                "True`"
            )
        fix = (
            "Pass what every step advances by one, such as "
            f"`global_step=optimizer.step`{early}."
        )
        times, rest = divmod(reached - self.step, num_run) if num_run else (0, 1)
        if times > 1 and not rest:
            fix = (
                f"Each step advances it {times} times, as {times} updates with one "
                "optimizer do. Count the steps apart from them: "
                "`self.step = armillary.create_global_step()` in the trainer, "
                "`self.step[...] += 1` in `train_step`, and `global_step=trainer.step`."
            )
        raise GlobalStepError(
            f"`trainer.train({num_asked})` advanced `global_step` from "
            f"{self.step} to {reached}, but {reason} advance it by {num_run}, to "
            f"{expected}. {fix}"
        )
