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

SPEED = "steps_per_second"


@dataclass(frozen=True)
class Run:
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
        last = self.entries[-1]
        unfinished = "stopped" if last.event == "stop" else "not done"
        return "done" if last.is_done else unfinished

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        return [each for each in self.records if each["record"] == "start"]

    @property
    def record(self) -> Mapping[str, Any]:
        """The first record of the last attempt."""
        return self.starts[-1] if self.starts else {}

    @functools.cached_property
    def curves(self) -> dict[tuple[str, str], list[tuple[int, float]]]:
        """Steps and values, by source and name: `("train", "loss")`."""
        found: dict[tuple[str, str], list[tuple[int, float]]] = {}
        kinds = ("train", "eval")
        records = [each for each in self.records if each["record"] in kinds]
        records.sort(key=lambda each: (kinds.index(each["record"]), each["step"]))
        for record in records:
            source = " ".join(filter(None, (record["record"], record.get("name"))))
            values = dict(record.get("values") or {})
            if SPEED in record:
                values[SPEED] = record[SPEED]
            for key, value in values.items():
                point = record["step"], float(value)
                found.setdefault((source, key), []).append(point)
        return found


def read_run(path: str | os.PathLike[str], name: str | None = None) -> Run:
    path = Path(path)
    journals = find_journals(path)
    folders = [path, *(child for child in path.iterdir() if child.is_dir())]
    folders = [epath.Path(folder) for folder in folders]
    saved = [each for folder in folders for each in find_checkpoints(folder)]
    return Run(
        name=name or path.resolve().name,
        path=path,
        records=tuple(read_metrics(path)),
        entries=tuple(read_entries(journals[0]) if len(journals) == 1 else ()),
        checkpoints=tuple(sorted(saved, key=lambda each: each.number)),
        best=next(filter(None, map(read_best, folders)), None),
    )


def find_runs(path: str | os.PathLike[str]) -> list[Path]:
    """Returns the directories of all runs at or below one, in order of names."""
    found = list(_walk(Path(path))) if os.path.isdir(path) else []
    if not found:
        raise ValueError(
            f"`{path}` is not a directory with a `{METRICS_NAME}` in it or below. A "
            "`Controller` writes this file into its `summary_dir`, or else next to its "
            "checkpoints: use that directory, or one above it."
        )
    return found


def read_runs(paths: Iterable[str | os.PathLike[str]]) -> list[Run]:
    """Reads all runs at or below some directories, and names each by its path's end."""
    found = [run.resolve() for path in paths for run in find_runs(path)]
    found = list(dict.fromkeys(found))
    count = 1
    while len({run.parts[-count:] for run in found}) < len(found):
        count += 1
    return [read_run(run, "/".join(run.parts[-count:])) for run in found]


def _walk(path: Path) -> Iterator[Path]:
    folders = sorted(child for child in path.iterdir() if child.is_dir())
    with_metrics = {child for child in folders if (child / METRICS_NAME).is_file()}
    trained = {child for child in with_metrics if _has_trained(child)}
    others = with_metrics | {c for c in folders if (c / GOODPUT_NAME).is_file()}
    if (path / METRICS_NAME).is_file() or (len(trained) == 1 and others > trained):
        yield path
        return
    for folder in folders:
        if not folder.is_symlink():
            yield from _walk(folder)


def _has_trained(folder: Path) -> bool:
    with open(folder / METRICS_NAME, "rb") as file:
        return any(line.startswith(b'{"record": "start"') for line in file)
