"""Summaries for Weights & Biases."""

import html
import io
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from armillary.summary._png import as_png
from armillary.summary._run_id import find_prefix, import_service, keep_id, read_id

ID_FILE = "wandb_run_id.txt"
_STEP = "global_step"
_MOST_BINS = 512


class WandbWriter:
    """Makes writers to one run of Weights & Biases; a `writer_fn`.

    All managers that it is given to write to the same run. Its identity is kept in the
    directory of the run, so a program that resumes goes on with it::

        wandb_writer = armillary.summary.WandbWriter(run_dir, project="digits")
        controller = armillary.Controller(
            ..., summary_manager=armillary.summary.SummaryManager(
                run_dir / "train",
                writer_fn=[armillary.summary.TensorBoardWriter, wandb_writer]))

    A nested directory begins the name: the loss above is `train/loss`. Values have the
    global step as their axis, so those that a resumed run repeats are not refused.

    Args:
        run_dir: The directory of the run, at or above all summaries.
        **options: For `wandb.init`, such as `project`, `entity`, `name` or `mode`.

    Raises:
        ImportError: If Weights & Biases is not installed.
        TypeError: If an option is one that the class sets itself.
        ValueError: When a manager writes outside of `run_dir`.
    """

    def __init__(self, run_dir: str | os.PathLike[str], **options: Any) -> None:
        self._wandb = import_service("wandb", "Weights & Biases", "wandb")
        for name in {"id", "resume", "dir"} & set(options):
            raise TypeError(
                f"`{name}` is {options[name]!r}, but `WandbWriter` sets it, so that a "
                "run goes on where it was. Leave it out, and use the `run_dir` of the "
                "run to go on with."
            )
        self._run_dir = Path(os.path.abspath(run_dir))
        self._options = options
        self._run: Any = None
        # Values of one step go together.
        self._values: dict[str, Any] = {}
        self._step = 0
        self._num_writers = 0

    def __call__(self, directory: str) -> "_Writer":
        """Returns the writer of one directory.

        Args:
            directory: Where other writers write; below `run_dir`.
        """
        prefix = find_prefix(self._run_dir, directory)
        if self._run is None:
            self._begin()
        self._num_writers += 1
        return _Writer(self, prefix)

    def log(self, name: str, value: Any, step: int) -> None:
        """Takes a value."""
        if step != self._step:
            self.flush()
        self._step = step
        self._values[name] = value

    def flush(self) -> None:
        """Sends the values."""
        if self._values:
            self._run.log({**self._values, _STEP: self._step})
            self._values = {}

    def configure(self, values: Mapping[str, Any]) -> None:
        """Sets hyperparameters, also those that have changed since the run began."""
        self._run.config.update(dict(values), allow_val_change=True)

    def histogram(self, edges: np.ndarray, counts: np.ndarray) -> Any:
        """Returns a histogram of at most as many bins as are allowed there."""
        width = -(-len(counts) // _MOST_BINS)
        starts = np.arange(0, len(counts), width)
        counts = np.add.reduceat(counts, starts)
        return self._wandb.Histogram(np_histogram=(counts, [*edges[starts], edges[-1]]))

    def image(self, pixels: np.ndarray) -> Any:
        """Returns an image."""
        image = import_service("PIL.Image", "Pillow", "wandb")
        return self._wandb.Image(image.open(io.BytesIO(as_png(pixels))))

    def text(self, text: str) -> Any:
        """Returns text that is shown as it is."""
        return self._wandb.Html(f"<pre>{html.escape(text)}</pre>")

    def close(self) -> None:
        """Ends the run with the last of its writers."""
        self.flush()
        self._num_writers -= 1
        if self._num_writers == 0:
            self._run.finish()
            self._run = None

    def _begin(self) -> None:
        path = self._run_dir / ID_FILE
        run_id = read_id(path)
        if run_id is None:
            # Kept first: if the program is killed now, the next attempt uses it.
            run_id = uuid.uuid4().hex[:12]
            keep_id(path, run_id)
        self._run = self._wandb.init(
            id=run_id, resume="allow", dir=str(self._run_dir), **self._options
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)


class _Writer:
    """Writes the summaries of one directory."""

    def __init__(self, service: WandbWriter, prefix: str) -> None:
        self._service, self._prefix = service, prefix
        self.flush, self.close = service.flush, service.close

    def scalar(self, tag: str, value: float, step: int) -> None:
        self._service.log(self._prefix + tag, value, step)

    def histogram(
        self, tag: str, edges: np.ndarray, counts: np.ndarray, step: int
    ) -> None:
        value = self._service.histogram(edges, counts)
        self._service.log(self._prefix + tag, value, step)

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        self._service.log(self._prefix + tag, self._service.image(pixels), step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._service.log(self._prefix + tag, self._service.text(text), step)

    def hyperparameters(self, values: Mapping[str, Any]) -> None:
        self._service.configure(values)
