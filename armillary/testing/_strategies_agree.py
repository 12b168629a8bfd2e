"""Checks that a trainer gets the same numbers under every strategy."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from armillary._checks import (
    check_callable,
    check_instance,
    check_not_negative,
    check_positive_int,
    list_lines,
)
from armillary.distribute._global_arrays import is_key
from armillary.distribute._strategy import Strategy
from armillary.state._lift import State
from armillary.trainer._contract import AbstractEvaluator, AbstractTrainer

_START = "the first step"
_OTHER_START = (
    "`make_trainer` must make the same trainer at each call: seed what it draws, as by "
    "`nnx.Rngs(0)`, `np.random.default_rng(0)` or `keras.utils.set_random_seed(0)`."
)
_CAUSES = (
    'Look for a reduction that does not fit the loss ("mean" for a mean over the '
    'examples of a replica, "sum" for one divided by the global batch), for a loss '
    "that is no mean of examples, and for statistics of a batch or random numbers, of "
    "which each replica has its own. What only grows with the steps is rounding: raise "
    "`tolerance`. Where a gradient is zero but for rounding, such as that of a bias of "
    "keys in attention, Adam makes a step of noise: name its path in `ignore`."
)


def assert_strategies_agree(
    make_trainer: Callable[[Strategy], AbstractTrainer],
    strategies: Sequence[Strategy],
    *,
    steps: int = 20,
    tolerance: float = 1e-4,
    ignore: Sequence[str] = (),
) -> None:
    """Checks that a trainer computes the same under each of several strategies.

    Each strategy gets a trainer of its own, which trains: one step, and then the
    others. Before and after both, everything that a checkpoint would hold is compared,
    and what `train` returned. A trainer that is also an evaluator then evaluates, until
    its data ends. With data whose last batch is short, and fewer of them than `steps`,
    the end of the data is part of the test: all must see it at the same step.

    Args:
        make_trainer: Called under the scope of each strategy, with it. It must make
            the same model, optimizer and data each time: with fixed seeds.
        strategies: At least two. The first one is what the others are compared with,
            such as `OneDeviceStrategy("cpu:0")`.
        steps: How many steps to train. All batches of the data may be fewer.
        tolerance: Largest difference in an array: the root of its mean square, relative
            to that of the values, or to 0.01 if that is smaller. Integers and random
            keys must be equal.
        ignore: Regular expressions, searched for in paths such as
            `Trainer/model/kernel`: arrays that are not compared.

    Raises:
        AssertionError: If they differ. It names the strategy, the arrays, by how much
            and where.
        TypeError: If something is no strategy, or `make_trainer` returns no trainer.
        ValueError: If there are fewer than two strategies.
    """
    check_callable("make_trainer", make_trainer)
    check_positive_int("steps", steps)
    check_not_negative("tolerance", tolerance)
    fix = 'Use paths, such as `ignore=["attention/key/bias"]`.'
    check_instance("ignore", ignore, list | tuple, fix)
    fix = 'Pass objects, as in `[OneDeviceStrategy("cpu:0"), MirroredStrategy()]`.'
    check_instance("strategies", strategies, list | tuple, fix)
    for index, strategy in enumerate(strategies):
        check_instance(f"strategies[{index}]", strategy, Strategy, fix)
    if len(strategies) < 2:
        raise ValueError(
            f"`strategies` has {len(strategies)}, but it takes two to compare. {fix}"
        )
    first, *others = strategies
    expected = _record(make_trainer, first, steps, ignore)
    for strategy in others:
        found = _record(make_trainer, strategy, steps, ignore)
        for moment, ours in expected.items():
            _compare(moment, ours, found[moment], first, strategy, tolerance)


def _record(
    make_trainer: Callable[[Strategy], AbstractTrainer],
    strategy: Strategy,
    steps: int,
    ignore: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """Returns what a trainer has at each moment: arrays and facts, by name."""
    moments: dict[str, dict[str, Any]] = {}
    with strategy.scope():
        trainer = make_trainer(strategy)
        fix = "Return a trainer, with its dataset, from `make_trainer(strategy)`."
        check_instance("make_trainer(strategy)", trainer, AbstractTrainer, fix)

        def note(name: str, output: Any) -> None:
            state = State([(trainer, type(trainer).__name__)])
            values = dict(zip(state.paths, state.read(), strict=True))
            for path, leaf in jax.tree_util.tree_leaves_with_path(output):
                values[f"output{jax.tree_util.keystr(path)}"] = leaf
            values["data_exhausted"] = trainer.data_exhausted
            moments[name] = {
                path: _as_host(value)
                for path, value in values.items()
                if not any(re.search(pattern, path) for pattern in ignore)
            }

        note(_START, None)
        note("one step", trainer.train(1))
        if steps > 1:
            note(f"{steps} steps", trainer.train(steps - 1))
        if isinstance(trainer, AbstractEvaluator):
            note("an evaluation", trainer.evaluate(-1))
    return moments


def _as_host(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def _compare(
    moment: str,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    first: Strategy,
    strategy: Strategy,
    tolerance: float,
) -> None:
    """Checks that a strategy has what the first one has.

    Raises:
        AssertionError: If it has something else.
    """
    lines = [
        f"{name}: only under {first if name in ours else strategy}"
        for name in sorted(ours.keys() ^ theirs.keys())
    ]
    for name in (name for name in ours if name in theirs):
        difference = _describe_difference(ours[name], theirs[name], tolerance)
        if difference is not None:
            lines.append(f"{name}: {difference}")
    if lines:
        is_start = moment == _START
        raise AssertionError(
            f"{'Before' if is_start else 'After'} {moment}, {strategy} has "
            f"other values than {first}, in {len(lines)} of {len(ours | theirs)} "
            f"places:\n{list_lines(lines)}\n{_OTHER_START if is_start else _CAUSES}"
        )


def _describe_difference(a: np.ndarray, b: np.ndarray, tolerance: float) -> str | None:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{b.dtype} {b.shape} instead of {a.dtype} {a.shape}"
    if a.size == 0 or np.array_equal(a, b):
        return None
    if not jax.dtypes.issubdtype(a.dtype, np.inexact):
        at = np.unravel_index(np.argmax(a != b), a.shape)
        return f"{b[at]} instead of {a[at]}{_place(at)}"
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    with np.errstate(invalid="ignore"):
        off = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    off = np.where(np.isnan(off), np.inf, off)
    at = np.unravel_index(np.argmax(off), off.shape)
    size = _root_mean_square(a[np.isfinite(a)])
    # What is zero but for rounding, such as a bias that a normalization undoes, has no
    # scale of its own.
    # One value of many may differ more: Adam divides tiny gradients by each other.
    ratio = _root_mean_square(off) / max(size, 0.01)
    if ratio <= tolerance:
        return None
    return f"{b[at]:.6g} instead of {a[at]:.6g}{_place(at)}; all differ by {ratio:.2g}"


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.abs(values) ** 2))) if values.size else 0.0


def _place(at: tuple[Any, ...]) -> str:
    return f" at {[int(index) for index in at]}" if at else ""
