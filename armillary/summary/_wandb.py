"""Summaries for Weights & Biases, in one run that a restarted program continues."""

import io
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from armillary._checks import check_path
from armillary._optional import import_optional
from armillary.summary._tensorboard import as_png

_STEP = "global_step"


class WandbWriter:
    """Makes writers to one run of Weights & Biases, for any number of managers.

    Use it as the `writer_fn` of a `SummaryManager`, or as one of several. The identity
    of the run is stored in its directory, so a program that resumes continues the same
    run. The writers write numbers, images and hyperparameters. The names of nested
    directories come first in a name, as in `train/loss`. The global step is the axis.
    `docs/logs/summaries.md` has an example.

    Args:
        run_dir: The directory of the run, at or above all summaries.
        **options: For `wandb.init`, such as `project`, `entity`, `name` or `mode`.

    Raises:
        ImportError: If Weights & Biases is not installed.
        ValueError: When a manager writes outside of `run_dir`.
    """

    def __init__(self, run_dir: str | os.PathLike[str], **options: Any) -> None:
        self._wandb = import_optional("wandb", "Weights & Biases", "wandb")
        self._run_dir = Path(check_path("run_dir", run_dir))
        self._options = options
        self._run: Any = None
        self._num_writers = 0
        # Values of one step are sent together.
        self._values: dict[str, Any] = {}
        self._step = 0

    def __call__(self, directory: str) -> Any:
        """Returns the writer of one directory, which must be in the run's directory."""
        absolute = Path(os.path.abspath(directory))
        below = absolute.relative_to(self._run_dir)
        if not self._num_writers:
            self._begin()
        self._num_writers += 1
        prefix = "".join(f"{part}/" for part in below.parts)

        def scalar(tag: str, value: float, step: int) -> None:
            self._write(prefix + tag, value, step)

        def image(tag: str, pixels: np.ndarray, step: int) -> None:
            self._write_image(prefix + tag, pixels, step)

        return SimpleNamespace(
            scalar=scalar,
            image=image,
            hyperparameters=self._configure,
            flush=self._flush,
            close=self._close,
        )

    def _begin(self) -> None:
        id_file = self._run_dir / "wandb_run_id.txt"
        run_id = ""
        if id_file.is_file():
            run_id = id_file.read_text().strip()
        if not run_id:
            # The id is stored first, so that the next attempt uses it even if the
            # program is killed now.
            run_id = uuid.uuid4().hex[:12]
            self._run_dir.mkdir(parents=True, exist_ok=True)
            id_file.write_text(run_id)

        self._run = self._wandb.init(
            id=run_id,
            resume="allow",
            dir=str(self._run_dir),
            **self._options,
        )
        # The axis of Weights & Biases counts calls, and its steps cannot go back.
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def _configure(self, values: Mapping[str, Any]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def _write(self, name: str, value: Any, step: int) -> None:
        if step != self._step:
            self._flush()
        self._step = step
        self._values[name] = value

    def _write_image(self, name: str, pixels: np.ndarray, step: int) -> None:
        # For an array, Weights & Biases would guess the range of the values.
        pillow = import_optional("PIL.Image", "Pillow", "wandb")
        image = pillow.open(io.BytesIO(as_png(pixels)))
        self._write(name, self._wandb.Image(image), step)

    def _flush(self) -> None:
        if self._values:
            self._run.log({**self._values, _STEP: self._step})
            self._values = {}

    def _close(self) -> None:
        self._flush()
        self._num_writers -= 1
        # All managers share the run, so it ends with the last writer.
        if not self._num_writers:
            self._run.finish()
