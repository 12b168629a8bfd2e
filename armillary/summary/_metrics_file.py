"""`metrics.jsonl`: the curves of a run, readable without any package.

Each line is one JSON object, `"record"` first; `docs/logs/summaries.md` names the
fields.
"""

import json
import math
import os
from pathlib import Path
from typing import Any, TypeAlias

from armillary._checks import check_path
from armillary._json_values import as_json, from_json
from armillary._records import LinesFile, read_lines
from armillary._rising_clock import RisingClock

FILE_NAME = "metrics.jsonl"
_FIELDS = {"record", "time", "step"}
# The clock needs only the latest records, and the file of a long run is large.
_END_BYTES = 1 << 16
_encode = json.JSONEncoder(allow_nan=False).encode
_Record: TypeAlias = dict[str, Any]


class MetricsFile:
    """Appends the records of a controller; one that trains begins with `"start"`.

    Readers put the files of a run in the order of time. So all of them share a clock,
    which continues from the records of earlier attempts.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        *,
        is_of_training: bool = False,
        clock: RisingClock | None = None,
    ) -> None:
        path = None
        # Python itself appends to the file, so it must be local.
        if directory and "://" not in os.fspath(directory):
            path = Path(directory) / FILE_NAME
        self._file = LinesFile(path, "metrics are")
        self._lines: list[str] = []
        self._waits_for_start = is_of_training

        self._clock = RisingClock() if clock is None else clock
        for line in self._file.read_end(_END_BYTES):
            self._clock.start_after(_read_time(line))
        self.last_step = -1  # The highest of all records.

    @property
    def is_on(self) -> bool:
        return self._file.is_on

    def write(self, record: str, step: int, **fields: Any) -> None:
        """Takes a record, for the next `flush`."""
        self.last_step = max(step, self.last_step)
        if record == "start":
            self._waits_for_start = False
        if self._waits_for_start or not self.is_on:
            return

        content = {"record": record, "time": self._clock.now(), "step": step, **fields}
        line = _encode(as_json(content))
        self._lines.append(line + "\n")

    def flush(self) -> None:
        """Appends the records to the file, in one piece."""
        if self._lines:
            text = "".join(self._lines)
            self._lines = []
            self._file.append(text)


def _read_time(line: bytes) -> float:
    try:
        return float(json.loads(line)["time"])
    except (LookupError, TypeError, ValueError):  # a part of a line
        return -math.inf


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the valid records of a run, in the order of time.

    If a later attempt repeated some steps, the earlier records of these steps are left
    out.

    Args:
        run_dir: A directory with a `metrics.jsonl`, or the directory above several
            such directories, whose files are read together; or one such file.

    Returns:
        Each record with its fields. The field `"folder"` is the name of the directory
        below `run_dir` in which its file is, or `""` for `run_dir` itself.

    Raises:
        ValueError: If there is no `metrics.jsonl`, or a file cannot be read.
    """
    folder_of_run = Path(check_path("run_dir", run_dir, only_python_opens=True))
    timed: list[tuple[float, _Record]] = []
    for path in _find_files(folder_of_run):
        is_below = path.parent.parent == folder_of_run
        folder = path.parent.name if is_below else ""
        timed += _read_file(path, folder)
    timed.sort(key=lambda pair: pair[0])
    return _drop_repeated([record for _, record in timed])


def _read_file(path: Path, folder: str) -> list[tuple[float, _Record]]:
    """Returns the valid records of one file, each with a time to sort by."""
    timed: list[tuple[float, _Record]] = []
    latest = -math.inf
    for _, record in read_lines(path):
        is_valid = isinstance(record, dict) and record.keys() >= _FIELDS
        if not is_valid:
            continue
        values = record.get("values") or {}
        for name, value in values.items():
            values[name] = from_json(value)
        # Within a file, the order of the lines counts, because in a file of an
        # earlier release the clock may go back.
        latest = max(latest, record["time"])
        timed.append((latest, {**record, "folder": folder}))
    return timed


def _drop_repeated(records: list[_Record]) -> list[_Record]:
    """Leaves out the records of steps that a later attempt repeated.

    A curve shows each step once, so the records go when the later attempt starts. The
    rule for `goodput.jsonl` is different: seconds were spent, so they are kept, and
    they count as lost only when another attempt has run the same steps.
    """
    starts = [record for record in records if record["record"] == "start"]
    trained = {start["folder"] for start in starts}
    kept: dict[Any, _Record] = {}
    for index, record in enumerate(records):
        if record["record"] == "start":
            # A folder of its own may belong to an evaluation, or to another run.
            others = trained - {record["folder"]}
            kept = {
                key: earlier
                for key, earlier in kept.items()
                if _stays(earlier, record["step"], others)
            }
            # Two attempts may start at the same step, and both records stay.
            key = index
        else:
            # An attempt that has no steps left evaluates the last step again.
            name = record.get("name")
            key = record["folder"], record["record"], name, record["step"]
            kept.pop(key, None)
        kept[key] = record
    return list(kept.values())


def _stays(record: _Record, step: int, others: set[str]) -> bool:
    """Returns whether a record still counts when an attempt starts at a step."""
    if record["record"] == "start" or record["folder"] in others:
        return True
    return record["step"] <= step


def _find_files(run_dir: Path) -> list[Path]:
    """Returns the files of a run: its own first, and then the files of its folders."""
    if run_dir.is_file():
        return [run_dir]
    found = sorted(run_dir.glob(f"*/{FILE_NAME}"))
    own = run_dir / FILE_NAME
    if own.is_file():
        found.insert(0, own)
    if not found:
        raise ValueError(
            f"`run_dir` is {str(run_dir)!r}, but there is no `{FILE_NAME}` in it or in "
            "a directory below it. Use the `summary_dir` of a `Controller`."
        )
    return found
