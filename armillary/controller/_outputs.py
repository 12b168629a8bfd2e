"""Outputs of loops and evaluations: log lines, history, summaries, curves, and actions.

Every log line starts with the loop and the global step, in the form of Orbit's::

    train | step:    100 | steps/sec:   52.1 | output: {'loss': 0.41237}
     eval | step:    100 | eval time:    1.3 sec | output: {'accuracy': 0.91406}
"""

import math
import pprint
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import numpy as jnp

from armillary._checks import check_encodable
from armillary._logging import logger
from armillary._records import RisingClock, find_numbers
from armillary.cluster._join import expire_boundary
from armillary.goodput._stopwatch import Category
from armillary.lifeline._lifeline import waiting
from armillary.summary._metrics_file import MetricsFile
from armillary.summary._summary_manager import SummaryManager
from armillary.typing import Action, Output

if TYPE_CHECKING:
    from armillary.controller._run import Run
    from armillary.controller._saving import Saving

_NUM_DIGITS = 5
_WIDTH = 80


class Records(Mapping[str, list[float]]):
    """Scalars by name: a list for each name, with one number for each step.

    A scalar that is missing at a step is NaN. Nested outputs have names such as
    `"train/loss"`. Values that are not scalars are left out.
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}

    @property
    def steps(self) -> list[int]:
        """The global step of each record."""
        return self._steps.tolist()

    def __getitem__(self, name: str) -> list[float]:
        return self._columns[name].tolist()

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        names = ", ".join(self._columns) or "no scalars"
        return f"{type(self).__name__}({len(self._steps)} records: {names})"


class History(Records):
    """The scalars of one call of `train` or `train_and_evaluate`, for reading only.

    ::

        history = controller.train(steps=1000)
        history["loss"]             # one number for each loop ...
        history.steps               # ... at these global steps
        history.eval["accuracy"]    # one number for each evaluation ...
        history.eval.steps          # ... at these
    """

    def __init__(self) -> None:
        super().__init__()
        self.eval = Records()


def add_record(records: Records, step: int, scalars: Mapping[str, float]) -> None:
    for name in scalars:
        if name not in records._columns:
            records._columns[name] = array("d", [math.nan] * len(records._steps))
    for name, column in records._columns.items():
        column.append(scalars.get(name, math.nan))
    records._steps.append(step)


class RunOutput(dict[str, Any]):
    """The output of the last evaluation of a run, with the history of the run.

    It is the dictionary that Orbit returns, and equal to one without a `history`.
    """

    def __init__(self, output: Mapping[str, Any], history: History) -> None:
        super().__init__(output)
        self.history = history


class Curves:
    """Writes outputs to summaries, and to the file of metrics next to them."""

    def __init__(
        self, summary_manager: SummaryManager, directory: Any, clock: RisingClock
    ) -> None:
        self.summary_manager = summary_manager
        self.summary_dir = getattr(summary_manager, "summary_dir", None)
        # The file of a training job may be next to the checkpoints. A job that only
        # evaluates them writes nothing there.
        is_with_checkpoints = self.summary_dir is None
        folder = directory if is_with_checkpoints else self.summary_dir
        self.file = MetricsFile(folder, is_of_training=is_with_checkpoints, clock=clock)

    def write(self, record: str, step: int, output: Output, **fields: Any) -> None:
        """Writes an output to the summaries, and `fields` to the file of metrics."""
        self.file.write(record, step, **fields)
        self.summary_manager.write_summaries(output, step=step)

    def resume_at(self, step: int) -> None:
        """Notes the step at which a restored run continues, if the manager can."""
        # A user's own manager may have only the methods of Orbit's manager.
        resume_at = getattr(self.summary_manager, "resume_at", None)
        if resume_at is not None:
            resume_at(step)

    def flush(self) -> None:
        self.summary_manager.flush()
        self.file.flush()


def log_line(loop: str, step: int, *parts: str) -> None:
    """Logs one line about a loop, `"train"` or `"eval"`, at a global step."""
    logger.info("%s", " | ".join((f"{loop:>5}", f"step: {step: 6d}", *parts)))


def fetch_output(output: Any, source: str) -> dict[str, Any]:
    """Returns the output of a loop as plain dictionaries of NumPy values."""
    if output is None:
        return {}
    if not isinstance(output, Mapping):
        raise TypeError(
            f"`{source}` returned {output!r} of type {type(output).__name__}, but it "
            "must return a dictionary of scalars or `None`. Return the value under a "
            'name, such as `{"loss": loss}`.'
        )
    seen: dict[str, tuple[Any, ...]] = {}
    for path, value in _walk(output):
        name = "/".join(map(str, path))
        what = f"`{source}` returned a value under the name"
        check_encodable(what, name, "use another name")
        other = seen.setdefault(name, path)
        if other != path:
            raise ValueError(
                f"`{source}` returned two values that are both called {name!r}: at "
                f"{_show(other)} and at {_show(path)}. Rename one of them."
            )
        for leaf in jax.tree.leaves(value):
            if isinstance(leaf, jax.Array):
                # All copies start before the first one is waited for.
                leaf.copy_to_host_async()
    return _fetch(output, source)


def _walk(
    output: Mapping[Any, Any], parents: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields each value of nested mappings with the keys that lead to it."""
    for name, value in output.items():
        path = (*parents, name)
        if isinstance(value, Mapping):
            yield from _walk(value, path)
        else:
            yield path, value


def _show(path: tuple[Any, ...]) -> str:
    return "`output" + "".join(f"[{name!r}]" for name in path) + "`"


def _fetch(output: Mapping[str, Any], source: str) -> dict[str, Any]:
    fetched: dict[str, Any] = {}
    for name, value in output.items():
        if isinstance(value, Mapping):
            fetched[name] = _fetch(value, source)
        elif callable(value) or hasattr(value, "compute"):
            raise TypeError(
                f"`{source}` returned an object of type {type(value).__name__} as "
                f"{name!r}, but it must return scalars. Compute the value, such as "
                f'`{{"{name}": self.{name}.compute()}}`.'
            )
        else:
            fetched[name] = jax.tree.map(_fetch_leaf, value)
    return fetched


def _fetch_leaf(leaf: Any) -> Any:
    # Indexing with `()` turns an array without axes into a NumPy scalar.
    return np.asarray(leaf)[()] if isinstance(leaf, jax.Array | np.ndarray) else leaf


def format_output(output: Mapping[str, Any]) -> str:
    """Returns `output` on one line, or indented on several if it does not fit."""
    rounded = _rounded(output)
    text = repr(rounded)
    if len(text) <= _WIDTH and "\n" not in text:
        return text  # The same text as from `pprint`, which takes ten times as long.
    lines = pprint.pformat(rounded, width=_WIDTH, sort_dicts=False).splitlines()
    return "".join(f"\n    {line}" for line in lines)


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    dtype = getattr(value, "dtype", object)
    if isinstance(value, float) or jnp.issubdtype(dtype, jnp.floating):
        return ShortFloat(value) if np.ndim(value) == 0 else value
    return value.item() if isinstance(value, np.generic) else value


class ShortFloat(float):
    """A float that prints with few digits."""

    def __repr__(self) -> str:
        text = f"{float(self):.{_NUM_DIGITS}g}"
        return f"{text}.0" if text.lstrip("-").isdigit() else text


def call_actions(actions: Iterable[Action], output: dict[str, Any]) -> None:
    for action in actions:
        expire_boundary()
        action(output)


def run_evaluations(
    run: "Run",
    saving: "Saving",
    evaluator: Any,
    num_steps: int,
    actions: Iterable[Action],
) -> dict[str, Any]:
    """Runs and reports one evaluation, or several by name with nested outputs."""
    step = run.read_step()

    def evaluate(evaluator: Any, name: str) -> dict[str, Any]:
        named = [name] if name else []
        # "Up to", because the data may end before `num_steps` steps.
        amount = "complete" if num_steps == -1 else f"up to {num_steps} steps of"
        log_line("eval", step, *named, f"running {amount} evaluation...")
        start = time.perf_counter()
        with run.goodput.phase(Category.EVALUATING):
            with run.scope():
                output = evaluator.evaluate(num_steps)
            with waiting():
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
    saving.note(output)
    with run.scope():
        call_actions(actions, output)
    saving.save_best()
    add_record(run.history.eval, step, find_numbers(output))
    return output
