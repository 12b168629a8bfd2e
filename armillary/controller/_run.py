"""The arguments of a controller, checked before use, and the state its parts share."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from armillary._checks import (
    check_instance,
    check_methods,
    check_num_steps,
    check_one_of,
    check_path,
    check_positive_int,
    check_seconds,
    counted,
    list_lines,
)
from armillary._logging import logger
from armillary._records import RisingClock
from armillary.cluster._join import expire_boundary, get_peers
from armillary.controller._outputs import Curves, History
from armillary.errors import StateStructureError
from armillary.goodput._journal import make_recorder
from armillary.goodput._stopwatch import Times, find_straggler
from armillary.state._slots import Role, Slot
from armillary.state._summarize import as_step_counter
from armillary.state._walk import slots_of
from armillary.trainer._contract import AbstractTrainer
from armillary.trainer._datasets import flatten_datasets
from armillary.trainer._standard_evaluator import StandardEvaluator, check_ends
from armillary.typing import Action

# Stragglers are found in two rounds of this many loops.
_COMPARED_LOOPS = 10
# The bytes of arrays that are checked when training has ended.
_MOST_BYTES = 64 * 2**20
_SUMMARIES = (
    ["write_summaries", "flush"],
    "Use `armillary.summary.SummaryManager(summary_dir)`.",
)
# For each argument, the methods that the controller calls, and a fix.
_METHODS = {
    "strategy": (["scope"], "Use a strategy such as `armillary.MirroredStrategy()`."),
    "checkpoint_manager": (
        ["save", "restore", "restore_or_initialize", "sync", "checkpoint"],
        "Use `armillary.CheckpointManager(checkpoint, directory)`.",
    ),
    "summary_manager": _SUMMARIES,
    "eval_summary_manager": _SUMMARIES,
}
_EVALUATOR = (
    "Derive it from `armillary.StandardEvaluator` or `AbstractEvaluator`; several need "
    'names: `evaluator={"validation": a, "test": b}`.'
)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    trainer = arguments["trainer"]
    evaluator = arguments["evaluator"]
    if trainer is None and evaluator is None:
        raise ValueError(
            "`trainer` and `evaluator` are both None, but a controller needs at least "
            "one of them. Pass `trainer=...`, `evaluator=...` or both."
        )
    fix = "Pass an instance of `armillary.StandardTrainer`, or of `AbstractTrainer`."
    check_instance("trainer", trainer, AbstractTrainer | None, fix)
    _check_evaluator(evaluator)
    as_step_counter(arguments["global_step"])
    for name, (methods, fix) in _METHODS.items():
        if arguments[name] is not None:
            check_methods(name, arguments[name], methods, fix)
    _check_intervals(arguments)
    for name in ("summary_dir", "eval_summary_dir"):
        if arguments[name] is not None:
            check_path(name, arguments[name])
    seconds = arguments["hang_timeout_seconds"]
    is_for_ever = isinstance(seconds, float) and seconds == math.inf
    if seconds is not None and not is_for_ever:
        fix = "Use `hang_timeout_seconds=600`, or `math.inf` to wait forever."
        check_seconds("hang_timeout_seconds", seconds, fix)
    check_one_of("progress", arguments["progress"], (True, False))
    fix = "Use `vars(arguments)` of parsed arguments, or `dataclasses.asdict(config)`."
    check_instance("hyperparameters", arguments["hyperparameters"], Mapping | None, fix)


def _check_evaluator(evaluator: Any) -> None:
    several = evaluator if isinstance(evaluator, Mapping) else {}
    for name, each in several.items():
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name:
            raise ValueError(
                f"`evaluator` has the name {name!r}, but each evaluator needs one that "
                'a directory can have. Use `evaluator={"validation": ...}`.'
            )
        check_methods(f"evaluator[{name!r}]", each, ["evaluate"], _EVALUATOR)
    if not several and evaluator is not None:
        check_methods("evaluator", evaluator, ["evaluate"], _EVALUATOR)


def _check_intervals(arguments: Mapping[str, Any]) -> None:
    """Raises if numbers of steps are not positive or do not fit each other."""
    steps_per_loop = arguments["steps_per_loop"]
    if arguments["trainer"] is not None and steps_per_loop is None:
        raise ValueError(
            "`steps_per_loop` is None, but a controller with a `trainer` needs it. "
            "Pass the steps of one inner loop, such as `steps_per_loop=100`."
        )
    is_number = steps_per_loop is not None and not callable(steps_per_loop)
    if is_number:
        check_positive_int("steps_per_loop", steps_per_loop)
    for name in ("log_interval", "summary_interval"):
        interval = arguments[name]
        if interval is not None:
            check_positive_int(name, interval)
        if interval is not None and is_number and interval % steps_per_loop:
            larger = (interval // steps_per_loop + 1) * steps_per_loop
            raise ValueError(
                f"`{name}` is {interval}, but it must be a multiple of "
                f"`steps_per_loop` ({steps_per_loop}), because it can end only between "
                f"loops. Use `{name}={larger}`."
            )


def warn_of_evaluators(trainer: Any, evaluator: Any) -> None:
    """Warns of evaluators that return no numbers, or evaluate a different model."""
    several = evaluator if isinstance(evaluator, Mapping) else {"": evaluator}
    for each in several.values():
        kind = type(each)
        if isinstance(each, StandardEvaluator):
            names = ("evaluate", "eval_end")
            if all(getattr(kind, n) is getattr(StandardEvaluator, n) for n in names):
                logger.warning(
                    "`%s` has no `eval_end`, so its evaluations return no numbers. "
                    "Add one: `def eval_end(self): return "
                    '{"loss": self.loss.compute()}`.',
                    kind.__name__,
                )
        if trainer is not None and each is not None:
            _warn_of_a_copy(trainer, each)


def _warn_of_a_copy(trainer: Any, evaluator: Any) -> None:
    """Warns if an evaluator and a trainer have parameters, but share none."""
    try:
        trained, held = (
            {
                slot.key: slot.path
                for slot in slots_of([(each, "")])
                if _is_learned(slot)
            }
            for each in (trainer, evaluator)
        )
    except StateStructureError:  # The step raises it as well, with a better message.
        return
    if trained and held and trained.keys().isdisjoint(held):
        logger.warning(
            "`%s` evaluates parameters that `%s` does not train, so they never "
            "change:\n%s\nGive it the model of the trainer (`self.model = "
            "trainer.model`) or a view of it (`nnx.view`), and not a copy "
            "(`nnx.clone`).",
            type(evaluator).__name__,
            type(trainer).__name__,
            list_lines(sorted(held.values()), most=5),
        )


def _is_learned(slot: Slot) -> bool:
    return slot.is_parameter() and slot.role is Role.PLAIN


def warn_of_bad_arrays(trainer: Any, step: int) -> None:
    """Warns if training left values that are not finite, for runs without outputs."""
    bad: list[str] = []
    num_bytes = 0
    leaves = [
        (path, leaf)
        for slot in slots_of([(trainer, "")])
        if slot.role is Role.PLAIN
        for path, leaf in zip(slot.paths, slot.read(), strict=True)
        if _can_be_bad(leaf)
    ]
    # Values that are not finite spread, so it is enough to check the small arrays.
    for path, leaf in sorted(leaves, key=lambda pair: pair[1].nbytes):
        num_bytes += leaf.nbytes
        if num_bytes > _MOST_BYTES:
            break
        copy = leaf.addressable_data(0) if leaf.is_fully_replicated else leaf
        values = np.asarray(copy)
        if not np.isfinite(values.astype(np.float32)).all():
            bad.append(path)
    if bad:
        logger.warning(
            "At step %d, %s of the trainer %s values that are not finite, and the "
            "output of its loops has no number that would show it:\n%s\nTo find the "
            "first such step, and the operation that made the value, start again with "
            '`StandardTrainerOptions(on_non_finite="raise")`.',
            step,
            counted(len(bad), "array"),
            "has" if len(bad) == 1 else "have",
            list_lines(bad, most=5),
        )


def _can_be_bad(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or leaf.is_deleted():
        return False
    is_here = leaf.is_fully_replicated or leaf.is_fully_addressable
    return is_here and jnp.issubdtype(leaf.dtype, jnp.floating)


def require(controller: Any, *attributes: str, for_method: str) -> None:
    """Raises if a controller lacks an argument that a method needs."""
    for attribute in attributes:
        if getattr(controller, attribute) is None:
            raise ValueError(
                f"`{attribute}` is None, but `{for_method}` needs it. Pass "
                f"`{attribute}=...` to `Controller`."
            )


def is_reached(step: int, target: int) -> bool:
    """Returns whether a global step is at a target or past it; -1 is not a target."""
    return target != -1 and step >= target


def check_target(
    name: str, steps: Any, step: int, epochs: Any, *, may_be_past: bool
) -> None:
    """Raises if training cannot continue from global step `step` up to `steps`.

    `may_be_past` says that the trainer itself decides where its loops end. So its last
    loop may have gone past `steps`.
    """
    check_num_steps(name, steps)
    if epochs is not None:
        check_positive_int("epochs", epochs)
    if steps != -1 and steps < step and not may_be_past:
        raise ValueError(
            f"`{name}` is {steps}, but the global step is already {step}, and "
            f"`{name}` is the step to train up to. Use `{name}={step}` or more."
        )


def check_evaluations_end(evaluator: Any, eval_steps: int) -> None:
    """Raises, before training begins, if an evaluation would never end."""
    several = evaluator.values() if isinstance(evaluator, Mapping) else [evaluator]
    for each in several:
        method = getattr(type(each), "evaluate", None)
        if method is StandardEvaluator.evaluate:
            datasets, _ = flatten_datasets(each.eval_dataset)
            check_ends("eval_steps", eval_steps, datasets)


class StopRequest:
    """A request to end a controller's call; all processes agree on the step."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._is_agreed = False
        self._asked_at = -1

    def clear(self) -> None:
        """Clears the request when a new call begins."""
        self.reason = None
        self._is_agreed = False
        expire_boundary()

    def make(self, reason: str) -> None:
        """Requests a stop; the first of several requests counts."""
        fix = 'Use `request_stop("the loss diverged")`.'
        check_instance("reason", reason, str, fix)
        # No lock and no logging, because a signal handler may interrupt either.
        if self.reason is None:
            self.reason = reason

    def is_agreed(self) -> bool:
        """Returns whether any process requested a stop; all processes call this."""
        peers = get_peers()
        if peers is None:
            return self.reason is not None
        # Between two loops, the first answer counts.
        boundary = peers.boundary
        if not self._is_agreed and self._asked_at != boundary.num_expired:
            self._asked_at = boundary.num_expired
            answers = boundary.take(self._say)
            answers = answers or boundary.exchange("whether to stop", self._say)
            for index, reasons in enumerate(answers):
                if reasons and not self._is_agreed:
                    who = f"requested in process {index} of {peers.count}"
                    self.reason = f"{reasons[0]} ({who})"
                    self._is_agreed = True
        return self._is_agreed

    def _say(self) -> list[str]:
        return [] if self.reason is None else [self.reason]


class Run:
    """Shared state of one controller's parts; `directory` holds the checkpoints."""

    def __init__(self, controller: Any, steps_per_loop: Any) -> None:
        self.trainer = controller.trainer
        self.strategy = controller.strategy
        self.steps_per_loop: int | Callable[[int], int] | None = steps_per_loop
        self.log_interval: int | None = controller.log_interval
        self.summary_interval: int | None = controller.summary_interval
        self.train_actions: tuple[Action, ...] = controller.train_actions
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
        self.stop = StopRequest()
        self.history = History()

    def take_history(self) -> History:
        """Returns the history of this call, and begins a new one."""
        history = self.history
        self.history = History()
        return history

    def log_stop(self) -> None:
        if self.stop.reason is not None:
            logger.info("stopped at step %d: %s", self.read_step(), self.stop.reason)


class Stragglers:
    """Finds a process that the others wait for over some loops, and warns once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._named: set[int] = set()
        self._before = run.goodput.times
        self._num_loops = 0
        self._last: list[Times] | None = None

    def look(self, step: int) -> None:
        """Compares the times of all processes, which all call this after each loop."""
        peers = get_peers()
        if peers is None:
            return
        self._num_loops += 1
        answers = peers.boundary.take(self._say)
        if not answers or not all(answers):
            return

        last = self._last
        self._last = [Times._make(each) for each in answers]
        count = 2 * self._num_loops
        self._num_loops = 0
        self._before = self._run.goodput.times
        found = find_straggler([last, self._last], self._named) if last else None
        if found is None:
            return
        self._named.add(found.process)
        text = (
            f"Process {found.process} of {peers.count} takes "
            f"{found.seconds / found.others:.1f} times as long as the others, mostly "
            f"for {found.phase}: {found.seconds / count:.3g} s per loop over {count} "
            f"loops, compared with {found.others / count:.3g} s. The others wait for "
            "it."
        )
        if peers.index == 0:
            logger.warning("%s", text)
        self._run.goodput.mark("straggler", step, text)

    def _say(self) -> list[float]:
        # Rarely, because an exchange costs less if all processes send the same.
        if self._num_loops < _COMPARED_LOOPS:
            return []
        return list(self._run.goodput.times.since(self._before))


@contextlib.contextmanager
def finishing(
    report: Callable[[], None], *finishes: Callable[[], None]
) -> Iterator[None]:
    """Calls `finishes` after a block, and after an error, which it raises, `report`."""
    try:
        yield
    except BaseException as error:
        peers = get_peers()
        cause = None if peers is None else peers.explain(error)
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
