"""A run, read from its files."""

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etils import epath

from armillary.checkpoint._best import Best, read_best
from armillary.checkpoint._folder import Saved, find_checkpoints
from armillary.goodput._journal import FILE_NAME as GOODPUT_NAME
from armillary.goodput._journal import (
    Entry,
    Goodput,
    add_up,
    find_journals,
    read_entries,
)
from armillary.summary._metrics_file import FILE_NAME as METRICS_NAME
from armillary.summary._metrics_file import read_metrics

SPEEDS = (
    "steps_per_second",
    "examples_per_second",
    "tokens_per_second",
    "tflops_per_second_per_device",
    "mfu",
)
"""The fields of a record with the speed of training."""
_LIMITS = ("start", "stop", "end")
"""The events at which a training begins or ends."""


@dataclass(frozen=True)
class RecordedRun:
    """The content of a run's files; times are in seconds since the epoch."""

    name: str
    path: Path
    records: tuple[Mapping[str, Any], ...]
    entries: tuple[Entry, ...]
    checkpoints: tuple[Saved, ...]
    best: Best | None

    @property
    def step(self) -> int:
        return max((record["step"] for record in self.records), default=0)

    @property
    def began(self) -> float | None:
        return min((record["time"] for record in self.records), default=None)

    @property
    def goodput(self) -> Goodput | None:
        """The time of the run by purpose; `None` if the run has not recorded it."""
        return add_up(self.entries) if self.entries else None

    @property
    def state(self) -> str:
        """`"done"`, `"stopped"` after a request, or `"not done"`; `""` if unknown."""
        if not self.entries:
            return ""
        # After its training, a program may still evaluate, save or restore.
        limits = [entry for entry in self.entries if entry.event in _LIMITS]
        last = (limits or self.entries)[-1]
        if last.is_done:
            return "done"
        if last.event == "stop":
            return "stopped"
        return "not done"

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        return [record for record in self.records if record["record"] == "start"]

    @property
    def record(self) -> Mapping[str, Any]:
        """The first record of the last attempt."""
        return self.starts[-1] if self.starts else {}

    @property
    def per_device(self) -> Mapping[str, Any]:
        """The work and the memory of each device in the last attempt, if known."""
        found = [
            record["per_device"] for record in self.records if "per_device" in record
        ]
        return found[-1] if found else {}

    def _of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [record for record in self.records if record["record"] == kind]

    @functools.cached_property
    def curves(self) -> dict[tuple[str, str], list[tuple[int, float]]]:
        """Steps and values, by source and name: `("train", "loss")`."""
        training = sorted(self._of_kind("train"), key=_step_of)
        evaluations = sorted(self._of_kind("eval"), key=_step_of)

        curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for record in training + evaluations:
            source = record["record"]
            if record.get("name"):
                source += f" {record['name']}"
            values = {name: record[name] for name in SPEEDS if name in record}
            # An output may have a number of its own, such as `mfu`.
            values |= record.get("values") or {}
            for metric, value in values.items():
                points = curves.setdefault((source, metric), [])
                points.append((record["step"], float(value)))
        return curves


def _step_of(record: Mapping[str, Any]) -> int:
    return record["step"]


def read_run(path: str | os.PathLike[str], name: str | None = None) -> RecordedRun:
    """Reads the files of one run."""
    path = Path(path)
    journals = find_journals(path)
    entries: Iterable[Entry] = ()
    # Several journals belong to several runs.
    if len(journals) == 1:
        entries = read_entries(journals[0])

    folders = [epath.Path(path)]
    folders += [epath.Path(child) for child in path.iterdir() if child.is_dir()]
    checkpoints: list[Saved] = []
    for folder in folders:
        checkpoints += find_checkpoints(folder)
    checkpoints.sort(key=lambda checkpoint: checkpoint.number)
    best_of_folders = map(read_best, folders)
    return RecordedRun(
        name=name or path.resolve().name,
        path=path,
        records=tuple(read_metrics(path)),
        entries=tuple(entries),
        checkpoints=tuple(checkpoints),
        best=next(filter(None, best_of_folders), None),
    )


def find_runs(path: str | os.PathLike[str]) -> list[Path]:
    """Returns the directories of all runs at or below one, in order of names."""
    found: list[Path] = []
    if os.path.isdir(path):
        found += _find_runs_below(Path(path))
    if not found:
        raise ValueError(
            f"`{path}` is not a directory with a `{METRICS_NAME}` in it or below. A "
            "`Controller` writes this file into its `summary_dir`, or else next to its "
            "checkpoints: use that directory, or one above it."
        )
    return found


def read_runs(paths: Iterable[str | os.PathLike[str]]) -> list[RecordedRun]:
    """Reads all runs at or below some directories, and names each by its path's end."""
    found: dict[Path, None] = {}
    for path in paths:
        for run in find_runs(path):
            found[run.resolve()] = None
    # The names have as many parts as are needed to tell the runs apart.
    num_parts = 1
    while len({run.parts[-num_parts:] for run in found}) < len(found):
        num_parts += 1

    runs: list[RecordedRun] = []
    for run in found:
        name = "/".join(run.parts[-num_parts:])
        runs.append(read_run(run, name))
    return runs


def _find_runs_below(path: Path) -> Iterator[Path]:
    """Yields the directories of runs at or below one."""
    folders = sorted(child for child in path.iterdir() if child.is_dir())
    with_metrics = {child for child in folders if (child / METRICS_NAME).is_file()}
    with_goodput = {child for child in folders if (child / GOODPUT_NAME).is_file()}
    trained = {child for child in with_metrics if _has_trained(child)}
    # One run may have folders for its summaries, evaluations and checkpoints.
    has_others = with_metrics | with_goodput > trained
    holds_one_run = len(trained) == 1 and has_others
    if (path / METRICS_NAME).is_file() or holds_one_run:
        yield path
        return
    for folder in folders:
        # A link may lead to a folder above, and so to an endless search.
        if not folder.is_symlink():
            yield from _find_runs_below(folder)


def _has_trained(folder: Path) -> bool:
    # `MetricsFile` writes "record" first, so the lines need not be decoded.
    with open(folder / METRICS_NAME, "rb") as file:
        return any(line.startswith(b'{"record": "start"') for line in file)
