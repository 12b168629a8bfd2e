"""A condition that holds when a metric is better than ever before."""

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from etils import epath

from armillary._checks import answers_old_names, check_one_of, check_path
from armillary._process import get_process
from armillary.actions._metric import (
    Metric,
    check_metric,
    describe,
    is_better,
    read_metric,
)
from armillary.actions._whole_files import write_whole
from armillary.typing import Output


@answers_old_names(
    filename="Use `directory`, in which it makes a file named for the metric."
)
class NewBestMetric:
    """Holds when the metric of an output is strictly better than all before.

    `test` only asks, `commit` also remembers the new value, and calling the object is
    the same as `commit`. Use `test` as a condition and `commit` as the last action, and
    a new best whose actions were interrupted is found again after a restart.

    The best value survives a restart if `directory` is given, or if the object is part
    of a `Checkpoint`.

    Args:
        metric: Key in the output, a path such as `"validation/loss"` into a nested one,
            or a function from the output to a number. NaN is never the best value.
        higher_is_better: Whether a larger value is better: true for an accuracy, false
            for a loss.
        directory: Where to keep the best value, in a JSON file named for the metric. It
            is made when the first value is written. `None` keeps it in memory only.
        write_metric: Whether to write the file; if false, it is only read when the
            object is made. Of several processes, only the chief writes in any case.

    Attributes:
        best_value: The best value so far, or `None` before the first one.
        file: Where it is kept, or `None`.

    Raises:
        TypeError: If `metric` is neither a string nor callable.
        ValueError: If `higher_is_better` is neither true nor false, if `directory` is
            given with a function that has no name to call the file by, or if the file
            there is not this metric's.
    """

    def __init__(
        self,
        metric: Metric,
        *,
        higher_is_better: bool,
        directory: str | os.PathLike[str] | None = None,
        write_metric: bool = True,
    ) -> None:
        check_metric(metric, higher_is_better)
        check_one_of("write_metric", write_metric, (True, False))
        self.metric = metric
        self.higher_is_better = higher_is_better
        self.write_metric = write_metric
        self.best_value: float | None = None
        self.file: Path | None = None
        if directory is not None:
            self.file = (
                Path(check_path("directory", directory))
                / f"best_{quote(_file_key(metric), safe='')}.json"
            )
            self._read_file()

    def __call__(self, output: Output) -> bool:
        """Returns whether `output` has a new best value, and remembers it."""
        return self.commit(output)

    def test(self, output: Output) -> bool:
        """Returns whether `output` has a new best value, without remembering it."""
        value = self.metric_value(output)
        higher = self.higher_is_better
        return is_better(value, self.best_value, higher=higher, margin=0.0)

    def commit(self, output: Output) -> bool:
        """Returns whether `output` has a new best value, and remembers it."""
        if not self.test(output):
            return False
        self.best_value = self.metric_value(output)
        is_writer = self.write_metric and get_process().is_chief
        if self.file is not None and is_writer:
            self._write_file(self.file)
        return True

    def metric_value(self, output: Output) -> float:
        """Returns the value of the metric in `output`.

        Raises:
            ValueError: If the output has no such key, or the value is not a scalar.
            TypeError: If the value is not a number.
        """
        return read_metric(self.metric, output)

    def get_state(self) -> dict[str, Any]:
        """Returns what a `Checkpoint` saves."""
        return {"best_value": self.best_value}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over what a `Checkpoint` saved."""
        self.best_value = state["best_value"]

    def _read_file(self) -> None:
        if self.file is None or not self.file.exists():
            return
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
            higher_is_better = content["higher_is_better"]
            best_value = float(content["best_value"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self.file} cannot be read as the best value of "
                f"{describe(self.metric)}: {error!r}. Delete the file to start afresh."
            ) from error
        if higher_is_better != self.higher_is_better:
            raise ValueError(
                f"`higher_is_better` is {self.higher_is_better}, but {self.file} was "
                f"written with {higher_is_better}. Use "
                f"`higher_is_better={higher_is_better}`, or delete the file."
            )
        self.best_value = best_value

    def _write_file(self, file: Path) -> None:
        content = {
            "best_value": self.best_value,
            "higher_is_better": self.higher_is_better,
        }
        # A reader finds the old file or the new one.
        data = json.dumps(content).encode()
        write_whole(epath.Path(file), data, f".{file.name}.{os.getpid()}")


def _file_key(metric: Metric) -> str:
    if isinstance(metric, str):
        return metric
    name = getattr(metric, "__name__", "<unnamed>")
    if not name.isidentifier():
        raise ValueError(
            f"`metric` is the function {name}, but the file in `directory` is called "
            "by the name of the metric. Use a key of the output, or a function that is "
            "defined with `def`."
        )
    return name
