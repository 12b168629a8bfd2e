"""Checks that a trainer gets the same numbers under every strategy, and sends no more.

Communication is counted in *rounds*. A round contains independent collectives, which
compilers for TPUs and GPUs combine into one. A step that sums its gradients once has
one round of all-reduces, however many parameters there are.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from armillary._checks import (
    check_instance,
    check_not_negative,
    check_not_negative_int,
    check_path,
    check_positive_int,
    check_takes,
    list_lines,
)
from armillary.distribute._global_arrays import is_key, make_auto_mesh
from armillary.distribute._strategy import Strategy
from armillary.plan._compile_worker import compile_exported
from armillary.plan._compiler import export_loop
from armillary.plan._costs import Collective, count_rounds
from armillary.plan._traffic import find_traffic
from armillary.state._lift import State
from armillary.state._summarize import find_placed_rows, find_placement
from armillary.trainer._contract import AbstractEvaluator, AbstractTrainer
from armillary.trainer._described import described
from armillary.trainer._standard_trainer import StandardTrainer

_PLATFORM = "cpu"
_START = "Before the first step"
_CAUSES = (
    'Look for a reduction that does not fit the loss ("mean" for a mean over the '
    'examples of a replica, "sum" for a loss divided by the global batch), for a loss '
    "that is not a mean of examples, and for batch statistics or random numbers, which "
    "differ between replicas. A difference that only grows with the steps is rounding: "
    "raise `tolerance`. If a gradient is zero up to rounding, Adam makes a step of "
    "noise: name its path in `ignore`."
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

    Each strategy gets a trainer of its own. It trains one step, and then the other
    steps. Before and after each of the two calls, the outputs of `train` are compared,
    and all values that a checkpoint would hold. A trainer that is also an evaluator
    then evaluates, until its data ends. If there are fewer batches than `steps`, the
    end of the data is part of the test, and a short last batch too: all strategies must
    reach it at the same step.

    Args:
        make_trainer: A function of a strategy, called under its scope. It must make
            the same model, optimizer and data each time, so use fixed seeds.
        strategies: At least two. The others are compared with the first one, such as
            `OneDeviceStrategy("cpu:0")`.
        steps: The number of training steps. The data may have fewer batches.
        tolerance: Largest difference in an array: its root mean square, relative to the
            root mean square of the values, or to 0.01 if that is smaller. Integers and
            random keys must be equal.
        ignore: Regular expressions, searched for in paths such as
            `Trainer/model/kernel`: arrays that are not compared.

    Raises:
        AssertionError: If values differ. The message names the strategy, the arrays,
            and the size and the place of the difference.
        ValueError: If there are fewer than two strategies.
    """
    check_takes("make_trainer", make_trainer, "strategy")
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
            f"`strategies` has {len(strategies)}, but it must have at least two. {fix}"
        )

    first, *others = strategies
    expected = _record(make_trainer, first, steps, ignore)
    for strategy in others:
        found = _record(make_trainer, strategy, steps, ignore)
        for moment, ours in expected.items():
            theirs = found[moment]
            lines = _list_differences(ours, theirs, tolerance)
            if not lines:
                continue
            fix = _CAUSES
            if moment == _START:
                fix = "Use fixed seeds in `make_trainer`, such as `nnx.Rngs(0)`."
            raise AssertionError(
                f"{moment}, {strategy} has other values than {first}, in "
                f"{len(lines)} of {len(ours | theirs)} places:\n"
                f"{list_lines(sorted(lines))}\n{fix}"
            )


def _list_differences(
    ours: dict[str, Any], theirs: dict[str, Any], tolerance: float
) -> list[str]:
    """Returns a line for each value that differs or is missing."""
    lines: list[str] = []
    for name in ours | theirs:
        if name not in theirs:
            lines.append(f"{name}: only under the first")
        elif name not in ours:
            lines.append(f"{name}: only under the second")
        else:
            text = _describe_difference(ours[name], theirs[name], tolerance)
            if text is not None:
                lines.append(f"{name}: {text}")
    return lines


def _record(
    make_trainer: Callable[[Strategy], AbstractTrainer],
    strategy: Strategy,
    steps: int,
    ignore: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """Returns the values of a trainer at each moment, by name."""
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
            compared: dict[str, np.ndarray] = {}
            for path, value in values.items():
                if any(re.search(pattern, path) for pattern in ignore):
                    continue
                if is_key(value):
                    value = jax.random.key_data(value)
                compared[path] = np.asarray(value)
            moments[name] = compared

        note(_START, None)
        note("After one step", trainer.train(1))
        if steps > 1:
            note(f"After {steps} steps", trainer.train(steps - 1))
        if isinstance(trainer, AbstractEvaluator):
            note("After an evaluation", trainer.evaluate(-1))
    return moments


def _describe_difference(a: np.ndarray, b: np.ndarray, tolerance: float) -> str | None:
    """Returns a text on how two arrays differ, or `None` if they agree."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{b.dtype} {b.shape} instead of {a.dtype} {a.shape}"
    if a.size == 0 or np.array_equal(a, b):
        return None

    if not jax.dtypes.issubdtype(a.dtype, np.inexact):
        at = np.unravel_index(np.argmax(a != b), a.shape)
        return f"{b[at]} instead of {a[at]} at {list(map(int, at))}"
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a = a.astype(wide)
    b = b.astype(wide)
    is_same = (a == b) | (np.isnan(a) & np.isnan(b))
    # The difference of two infinite values is NaN, and NumPy warns about it.
    with np.errstate(invalid="ignore"):
        off = np.where(is_same, 0.0, np.abs(a - b))
    # An infinite value, or NaN, on one side only.
    off = np.where(np.isnan(off), np.inf, off)
    at = np.unravel_index(np.argmax(off), off.shape)
    size = _root_mean_square(a[np.isfinite(a)])
    # An array may be zero up to rounding, such as a bias that a normalization undoes.
    # So the scale has a lower bound. The root mean square is compared, because single
    # values may differ more: Adam divides tiny gradients by each other.
    ratio = _root_mean_square(off) / max(size, 0.01)
    if ratio <= tolerance:
        return None
    place = list(map(int, at))
    return f"{b[at]:.6g} instead of {a[at]:.6g} at {place}; all differ by {ratio:.2g}"


def _root_mean_square(values: np.ndarray) -> float:
    if not values.size:
        return 0.0
    return float(np.sqrt(np.mean(np.abs(values) ** 2)))


def assert_collectives(
    trainer: StandardTrainer,
    *,
    all_reduce: int = 1,
    all_gather: int = 0,
    reduce_scatter: int = 0,
    all_to_all: int = 0,
    collective_permute: int = 0,
    max_bytes: int | None = None,
    num_replicas: int | None = None,
) -> None:
    """Checks the number of collectives in one compiled step of a trainer.

    The step is compiled and not run; the trainer and its data do not change.

    Args:
        trainer: The trainer, under a `MirroredStrategy`.
        all_reduce: Rounds of all-reduces: the number of all-reduces that must follow
            each other. The default fits a step that sums its gradients once.
        all_gather: Rounds of all-gathers.
        reduce_scatter: Rounds of reduce-scatters.
        all_to_all: Rounds of all-to-all exchanges.
        collective_permute: Rounds of permutes.
        max_bytes: The limit for the bytes of all collectives of a step. The bytes of
            the operands on each device count, or of the result for all-gathers.
            Gradients have as many bytes as the parameters.
        num_replicas: The number of replicas to compile for. `None` takes all CPU
            devices of this process.

    Raises:
        AssertionError: If a number of rounds differs, or there are more bytes.
        ValueError: If there are fewer than two CPU devices, or the strategy is for one
            device.
    """
    expected = {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "collective_permute": collective_permute,
    }
    limits = expected if max_bytes is None else expected | {"max_bytes": max_bytes}
    for name, wanted in limits.items():
        check_not_negative_int(name, wanted)

    found = find_collectives(trainer, num_replicas)
    counts = {name: count_rounds(found, name.replace("_", "-")) for name in expected}
    total = sum(collective.times * collective.num_bytes for collective in found)
    wrong = [
        f"{counts[name]} rounds of `{name}` and not {wanted}"
        for name, wanted in expected.items()
        if counts[name] != wanted
    ]
    if max_bytes is not None and total > max_bytes:
        wrong.append(f"{total} bytes on each device, and `max_bytes` is {max_bytes}")
    if wrong:
        in_order = sorted(found, key=lambda each: each.round)
        shown = list_lines(map(_describe_collective, in_order))
        raise AssertionError(
            f"A step of {type(trainer).__name__} has {', '.join(wrong)}. Its "
            f"collectives are:\n{shown or '  none'}"
        )


def assert_shardings(trainer: Any, path: str | Path) -> None:
    """Checks that each array of a trainer lies where a file says.

    The first call writes the file, and raises, so that somebody looks at it. Keep the
    file with the tests. If you change the place of an array on purpose, delete the file
    and run the test again. Nothing is compiled, and no device is used.

    Args:
        trainer: A trainer that holds a strategy, or any object that `summarize` takes.
        path: The file, in JSON: for each array, the axes of the mesh along its axes.

    Raises:
        AssertionError: If arrays are divided differently, are new or are gone, or if
            the file did not exist.
        TypeError: If `trainer` holds no strategy.
    """
    file = Path(check_path("path", path, only_python_opens=True))
    placement = find_placement(trainer)
    if placement is None:
        raise TypeError(
            f"`trainer` is of type {type(trainer).__name__}, and holds no strategy, so "
            "its arrays have no place. Assign the strategy to an attribute: "
            "`self.strategy = strategy`."
        )
    found: dict[str, Any] = {}
    for row in find_placed_rows(trainer, placement):
        spec = row.place.spec if row.place else ()
        found[row.path] = [list(x) if isinstance(x, tuple) else x for x in spec]

    if not file.exists():
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()]
        file.write_text("{\n  " + ",\n  ".join(lines) + "\n}\n")
        raise AssertionError(
            f"`{file}` did not exist. It now has the places of {len(found)} arrays. "
            "Look at it, keep it with the tests, and run the test again."
        )
    expected = json.loads(file.read_text())
    names = list(dict.fromkeys([*expected, *found]))
    changes = [
        f"{name}: {expected.get(name, 'not there')} became {found.get(name, 'gone')}"
        for name in names
        if expected.get(name) != found.get(name)
    ]
    if changes:
        raise AssertionError(
            f"{len(changes)} of {len(names)} arrays are not where `{file}` says:\n"
            f"{list_lines(changes)}\n"
            "If this is on purpose, delete the file and run the test again."
        )


def _describe_collective(collective: Collective) -> str:
    text = (
        f"round {collective.round}: {collective.kind} of {collective.num_bytes} bytes"
    )
    if collective.times > 1:
        text += f", {collective.times} times"
    return text


def find_collectives(
    trainer: StandardTrainer, num_replicas: int | None = None
) -> list[Collective]:
    """Returns the collectives that run in every step of a trainer, on CPU devices.

    Args:
        trainer: As for `assert_collectives`, like `num_replicas`.
        num_replicas: The number of replicas to compile for.

    Raises:
        ValueError: If there are fewer than two CPU devices, or the strategy is for one
            device.
    """
    fix = "Derive it from `armillary.StandardTrainer`."
    check_instance("trainer", trainer, StandardTrainer, fix)
    devices = jax.local_devices(backend=_PLATFORM)
    count = len(devices)
    if num_replicas is not None:
        count = check_positive_int("num_replicas", num_replicas)
    if not 2 <= count <= len(devices):
        raise ValueError(
            f"`num_replicas` is {num_replicas!r}, and this process has {len(devices)} "
            "CPU devices. A step sends data only between two or more replicas, and "
            "each needs a device: begin the tests with "
            '`jax.config.update("jax_num_cpu_devices", 8)`.'
        )
    with described(trainer, count, _PLATFORM) as loop:
        program = export_loop(loop, _PLATFORM)
    arranged = np.asarray(devices[:count]).reshape(loop.mesh.axis_sizes)
    mesh = make_auto_mesh(arranged, loop.mesh.axis_names)
    compiled = compile_exported(program, mesh, _PLATFORM, loop.compiler_options)
    traffic = find_traffic(compiled.as_text(), loop.depth, count)
    return [collective for collective in traffic.collectives if collective.is_of_step]
