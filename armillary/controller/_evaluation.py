"""Runs evaluations and reports them: log lines, summaries, the eval actions.

How an evaluator learns that no checkpoint will follow: a file beside them.

It appears when the program that trains ends, if its last training ended well: a program
may train several times. It is taken away when a program begins to train again.

Waits for checkpoints that another job writes, and passes over what is not usable.
"""

import atexit
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from armillary._logging import logger
from armillary._process import get_process
from armillary.cluster._join import expire_boundary
from armillary.controller._reports import Curves, fetch_output, format_output, log_line
from armillary.errors import CheckpointDamageError
from armillary.goodput._journal import Recorder
from armillary.goodput._stopwatch import Category
from armillary.typing import Action

FILE_NAME = "DONE"

_texts: dict[str, str] = {}


def begin_training(directory: str | None) -> None:
    """Takes the file of an earlier training away.

    All processes call it, and the chief does it.
    """
    from etils import epath

    if directory is None or not get_process().is_chief:
        return
    _texts.pop(directory, None)
    path = epath.Path(directory) / FILE_NAME
    try:
        if path.is_file():
            path.unlink()
    except OSError as error:
        logger.warning(
            "`%s` cannot be removed (%s): an evaluator may end too early.", path, error
        )


def end_training(directory: str | None, step: int) -> None:
    """Lets the end of this program say that training is over, unless that goes on."""
    if directory is not None and get_process().is_chief:
        _texts[directory] = json.dumps({"step": step, "time": time.time()})


@atexit.register
def announce_ends() -> None:
    """Writes the files; the interpreter calls it when the program ends."""
    if not _texts:
        return
    from etils import epath

    for directory, text in _texts.items():
        path = epath.Path(directory) / FILE_NAME
        try:
            # A temporary directory may be gone by now.
            if path.parent.is_dir():
                path.write_text(text)
        except OSError as error:
            logger.warning(
                "`%s` cannot be written (%s): an evaluator may wait on.", path, error
            )


def read_end(directory: str | None) -> str | None:
    """Returns what the file says, another text for each training, or `None`."""
    from etils import epath

    if directory is None:
        return None
    try:
        return (epath.Path(directory) / FILE_NAME).read_text()
    except OSError:
        return None


_POLL_SECONDS = 1.0
_OLD_END_SECONDS = 300.0
"""After this time, the end of an earlier training counts: no other one has begun."""


def watch_checkpoints(
    list_checkpoints: Callable[[], Sequence[str]],
    read_end: Callable[[], str | None],
    *,
    timeout: float | None,
    timeout_fn: Callable[[], bool] | None,
    should_stop: Callable[[], bool],
) -> Iterator[str]:
    """Yields every checkpoint once, oldest first, as they appear.

    When training has ended, it ends with the last of them. An end that is there from
    the start may be that of an earlier training, while a longer one is about to begin
    and to take it away. So it counts only after five minutes.

    `read_end` returns a text once training has ended, another one for each training.
    The timeout is that of `Controller.evaluate_continuously`.
    """
    seen: set[str] = set()
    old_end, old_end_counts = read_end(), time.monotonic() + _OLD_END_SECONDS
    deadline = _deadline(timeout)
    while not should_stop():
        # ORDER: the clock is read before the directory, so that a checkpoint written
        # in the last moment of the wait is still found; so is the end of training.
        now = time.monotonic()
        remaining, is_old_end_due = deadline - now, now >= old_end_counts
        end = read_end()
        new = [path for path in list_checkpoints() if path not in seen]
        if new:
            seen.add(new[0])
            yield new[0]
            deadline = _deadline(timeout)
        elif end is not None and (end != old_end or is_old_end_due):
            return
        elif remaining > 0:
            time.sleep(min(_POLL_SECONDS, remaining))
        elif timeout_fn is None or timeout_fn():
            return
        else:
            deadline = _deadline(timeout)


def restore_if_good(restore: Callable[[str], object], path: str) -> bool:
    """Restores a checkpoint, unless it is damaged or the other job deletes it now.

    Returns whether it was restored; if not, a warning says why.
    """
    from etils import epath

    try:
        restore(path)
    except Exception as error:
        if not epath.Path(path).exists():
            reason = "it was deleted meanwhile"
        elif isinstance(error, CheckpointDamageError):
            reason = f"it is damaged: {error.damage}"
        else:
            raise
        logger.warning("`%s` is not evaluated: %s.", path, reason)
        return False
    return True


def _deadline(timeout: float | None) -> float:
    return float("inf") if timeout is None else time.monotonic() + timeout


def run_evaluations(
    evaluator: Any,
    num_steps: int,
    *,
    step: int,
    scope: Callable[[], AbstractContextManager[Any]],
    goodput: Recorder,
    curves: Curves,
    actions: Iterable[Action],
) -> dict[str, Any]:
    """Runs one evaluation, or those that have names; returns NumPy values.

    The outputs of several are nested. Actions are called once, with the whole output.
    """

    def run(evaluator: Any, name: str) -> dict[str, Any]:
        named = [name] if name else []
        # The data may end before so many steps.
        amount = "complete" if num_steps == -1 else f"up to {num_steps} steps of"
        log_line("eval", step, *named, f"running {amount} evaluation...")
        start = time.perf_counter()
        with goodput.phase(Category.EVALUATING):
            with scope():
                output = evaluator.evaluate(num_steps)
            output = fetch_output(output, "evaluator.evaluate")
        seconds = time.perf_counter() - start
        expire_boundary()
        goodput.mark("evaluation", step)
        took = f"eval time: {seconds: 6.1f} sec"
        log_line("eval", step, *named, took, f"output: {format_output(output)}")
        curves.write_evaluation(step, output, name=name, seconds=seconds)
        return output

    if isinstance(evaluator, Mapping):
        output = {name: run(each, name) for name, each in evaluator.items()}
    else:
        output = run(evaluator, "")
    with scope():
        for action in actions:
            expire_boundary()
            action(output)
    return output
