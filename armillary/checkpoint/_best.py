"""The best checkpoint of a directory, recorded in a file next to the checkpoints.

The file is written before a checkpoint has its name, so it also holds the previous best
checkpoint. It identifies a checkpoint by the time of its save, because names can
repeat.
"""

import json
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from armillary._checks import printable
from armillary._json_values import find_numbers
from armillary._records import write_whole
from armillary.checkpoint._folder import Saved, read_header
from armillary.checkpoint._storage import sync_folder

_FILE_NAME = "BEST"


class Mark(NamedTuple):
    """An evaluation's value of the metric that decides which checkpoint is best."""

    metric: str
    higher_is_better: bool
    value: float


class Best(NamedTuple):
    """The checkpoint that an evaluation found best."""

    saved: Saved
    mark: Mark

    def __str__(self) -> str:
        mark = self.mark
        return printable(
            f"best {mark.metric} {mark.value:.5g} ({self.saved.path.name})"
        )


def read_best(directory: epath.Path) -> Best | None:
    """Returns the best checkpoint, if an evaluation has found one and it exists."""
    file = directory / _FILE_NAME
    try:
        for found in json.loads(file.read_bytes()):
            saved = read_header(directory / found.pop("checkpoint"))
            saved_at = found.pop("saved_at")
            if isinstance(saved, Saved) and saved.saved_at == saved_at:
                return Best(saved, Mark(**found))
    except FileNotFoundError:
        pass
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"`{file}` is damaged ({type(error).__name__}: {error}), so the best "
            "checkpoint is unknown. Delete the file to start again."
        ) from error
    return None


def write_best(directory: epath.Path, saved: Saved, mark: Mark) -> None:
    """Records on disk that a checkpoint is the best one; it may not be complete yet."""
    found = [Best(saved, mark)]
    before = read_best(directory)
    if before is not None and before.saved != saved:
        found.append(before)
    records: list[dict[str, Any]] = []
    for best in found:
        name = best.saved.path.name
        saved_at = best.saved.saved_at
        records.append(
            {"checkpoint": name, "saved_at": saved_at, **best.mark._asdict()}
        )
    text = json.dumps(records)
    file = directory / _FILE_NAME
    write_whole(file, text.encode(), f".{_FILE_NAME}.{os.getpid()}")
    sync_folder(directory)


def check_best(
    metric: Any, higher_is_better: Any, directory: epath.Path
) -> tuple[str, bool] | None:
    """Returns the metric and its direction, checked against the directory."""
    if metric is None and higher_is_better is None:
        return None
    given = f"`keep_best` is {metric!r} and `higher_is_better` is {higher_is_better!r}"
    is_direction = isinstance(higher_is_better, bool)
    if not isinstance(metric, str) or not metric or not is_direction:
        raise ValueError(
            f"{given}, but they must be the name of a metric and True or False. Use "
            '`keep_best="accuracy", higher_is_better=True`.'
        )
    best = read_best(directory)
    if best is not None and best.mark[:2] != (metric, higher_is_better):
        raise ValueError(
            f"{given}, but in {str(directory)!r} they were {best.mark[0]!r} and "
            f"{best.mark[1]}. Use these values, or delete the file `{_FILE_NAME}` "
            "there to start again."
        )
    return metric, higher_is_better


def make_mark(best_by: tuple[str, bool], output: Mapping[str, Any]) -> Mark:
    """Returns the value of the metric in an output."""
    metric, higher_is_better = best_by
    numbers = find_numbers(output)
    if metric not in numbers:
        names = ", ".join(f"`{name}`" for name in numbers)
        raise ValueError(
            f"`keep_best` is {metric!r}, which the output of the evaluation does "
            f"not have. Use one of its numbers ({names or 'there are none'})."
        )
    return Mark(metric, higher_is_better, float(numbers[metric]))


def is_best(mark: Mark, directory: epath.Path, step: int | None) -> bool:
    """Returns whether the values at a step are the best so far."""
    best = read_best(directory)
    if math.isnan(mark.value):
        return False
    if best is None:
        return True
    if mark.value == best.mark.value:
        # Ties keep the earlier checkpoint, unless the same step is saved again.
        return best.saved.number == step
    return (mark.value > best.mark.value) == mark.higher_is_better
