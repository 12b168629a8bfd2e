"""Summaries for Weights & Biases."""

import html
import io
import os
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from armillary.summary._png import as_png
from armillary.summary._service import (
    Service,
    ServiceWriter,
    import_service,
    keep_id,
    read_id,
)

ID_FILE = "wandb_run_id.txt"
_STEP = "global_step"
_MOST_BINS = 512


class _Writer(ServiceWriter):
    def histogram(
        self, tag: str, edges: np.ndarray, counts: np.ndarray, step: int
    ) -> None:
        # Of bins, so many are allowed there.
        width = -(-len(counts) // _MOST_BINS)
        starts = np.arange(0, len(counts), width)
        bins = np.add.reduceat(counts, starts), [*edges[starts], edges[-1]]
        self._log(tag, self._service.wandb.Histogram(np_histogram=bins), step)

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        image = import_service("PIL.Image", "Pillow", "wandb")
        opened = image.open(io.BytesIO(as_png(pixels)))
        self._log(tag, self._service.wandb.Image(opened), step)

    def text(self, tag: str, text: str, step: int) -> None:
        shown = f"<pre>{html.escape(text)}</pre>"
        self._log(tag, self._service.wandb.Html(shown), step)


class WandbWriter(Service):
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

    _writer_type = _Writer

    def __init__(self, run_dir: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(run_dir)
        self.wandb = import_service("wandb", "Weights & Biases", "wandb")
        for name in {"id", "resume", "dir"} & set(options):
            raise TypeError(
                f"`{name}` is {options[name]!r}, but `WandbWriter` sets it, so that a "
                "run goes on where it was. Leave it out, and use the `run_dir` of the "
                "run to go on with."
            )
        self._options = options
        self._run: Any = None
        # Values of one step go together.
        self._values: dict[str, Any] = {}
        self._step = 0

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

    def _begin(self) -> None:
        path = self._run_dir / ID_FILE
        run_id = read_id(path)
        if run_id is None:
            # Kept first: if the program is killed now, the next attempt uses it.
            run_id = uuid.uuid4().hex[:12]
            keep_id(path, run_id)
        self._run = self.wandb.init(
            id=run_id, resume="allow", dir=str(self._run_dir), **self._options
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def _end(self) -> None:
        self._run.finish()
