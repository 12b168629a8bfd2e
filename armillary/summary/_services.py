"""Summaries for Weights & Biases and for MLflow, each in one run that goes on."""

import atexit
import io
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from armillary._logging import logger
from armillary._optional import import_optional
from armillary.summary._summary_manager import as_png

_STEP = "global_step"
_BATCH = 1000  # Most metrics of one request to MLflow.
_PAUSE_SECONDS = 600.0


class _Service:
    """Makes writers to one run of a service, which ends with the last of them."""

    _begin: Callable[[], None]
    _write_scalar: Callable[[str, float, int], None]
    _write_image: Callable[[str, np.ndarray, int], None]
    _configure: Callable[[Mapping[str, Any]], None]
    _flush: Callable[[], None]
    _end: Callable[[], None]

    def __init__(self, run_dir: str | os.PathLike[str], id_file: str) -> None:
        self._run_dir = Path(os.path.abspath(run_dir))
        self._id_file = self._run_dir / id_file
        self._num_writers = 0

    def __call__(self, directory: str) -> Any:
        """Returns the writer of one directory, which must be in that of the run."""
        below = Path(os.path.abspath(directory)).relative_to(self._run_dir)
        if not self._num_writers:
            self._begin()
        self._num_writers += 1
        prefix = "".join(f"{part}/" for part in below.parts)
        return SimpleNamespace(
            scalar=lambda tag, *rest: self._write_scalar(prefix + tag, *rest),
            image=lambda tag, *rest: self._write_image(prefix + tag, *rest),
            hyperparameters=self._configure,
            flush=self._flush,
            close=self._close,
        )

    def _close(self) -> None:
        self._flush()
        self._num_writers -= 1
        if not self._num_writers:
            self._end()

    def _find_id(self, make: Callable[[], str]) -> str:
        """Returns the name of the run, which the first attempt keeps for all others."""
        run_id = self._id_file.read_text() if self._id_file.is_file() else ""
        if not run_id:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            run_id = make()
            self._id_file.write_text(run_id)
        return run_id.strip()


class WandbWriter(_Service):
    """Makes writers to one run of Weights & Biases, whichever managers have it.

    It is a `writer_fn`, or one of several, of a `SummaryManager`. Its identity is in
    its directory, so a program that resumes goes on with it. It takes numbers, images
    and hyperparameters. A nested directory begins the name, such as `train/loss`. The
    global step is the axis. `docs/summaries.md` has an example.

    Args:
        run_dir: The directory of the run, at or above all summaries.
        **options: For `wandb.init`, such as `project`, `entity`, `name` or `mode`.

    Raises:
        ImportError: If Weights & Biases is not installed.
        ValueError: When a manager writes outside of `run_dir`.
    """

    def __init__(self, run_dir: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(run_dir, "wandb_run_id.txt")
        self._wandb = import_optional("wandb", "Weights & Biases", "wandb")
        self._options = options
        self._run: Any = None
        # Values of one step go together.
        self._values: dict[str, Any] = {}
        self._step = 0

    def _begin(self) -> None:
        # Kept first: if the program is killed now, the next attempt uses it.
        run_id = self._find_id(lambda: uuid.uuid4().hex[:12])
        self._run = self._wandb.init(
            id=run_id, resume="allow", dir=str(self._run_dir), **self._options
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def _configure(self, values: Mapping[str, Any]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def _write_scalar(self, name: str, value: Any, step: int) -> None:
        if step != self._step:
            self._flush()
        self._step = step
        self._values[name] = value

    def _write_image(self, name: str, pixels: np.ndarray, step: int) -> None:
        # Of an array, it would guess how bright it is.
        pillow = import_optional("PIL.Image", "Pillow", "wandb")
        image = pillow.open(io.BytesIO(as_png(pixels)))
        self._write_scalar(name, self._wandb.Image(image), step)

    def _flush(self) -> None:
        if self._values:
            self._run.log({**self._values, _STEP: self._step})
            self._values = {}

    def _end(self) -> None:
        self._run.finish()


class MlflowWriter(_Service):
    """Makes writers to one run of MLflow, and is used like `WandbWriter`.

    Images are artifacts of the run. What a server does not take is in the log, and
    training goes on: numbers wait for ten minutes, until it can be reached again, and
    hyperparameters stay those that a run began with.

    Args:
        run_dir: The directory of the run, at or above all summaries.
        experiment: The name of the experiment, which is made if there is none.
        tracking_uri: Where runs are kept; `None` asks MLflow's settings.

    Raises:
        ImportError: If MLflow is not installed.
        ValueError: When a manager writes outside of `run_dir`.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        experiment: str = "Default",
        *,
        tracking_uri: str | None = None,
    ) -> None:
        super().__init__(run_dir, "mlflow_run_id.txt")
        tracking, self._entities, self._errors = (
            import_optional(f"mlflow.{name}", "MLflow", "mlflow")
            for name in ("tracking", "entities", "exceptions")
        )
        self._client = tracking.MlflowClient(tracking_uri=tracking_uri)
        self._experiment = experiment
        self._run_id: str | None = None
        self._metrics: list[Any] = []
        self._next_try = 0.0

    def _begin(self) -> None:
        self._run_id = self._find_id(self._create_run)
        self._client.update_run(self._run_id, status="RUNNING")
        # Nobody closes the manager of a program that simply ends.
        atexit.register(self._end)

    def _create_run(self) -> str:
        client, name = self._client, self._experiment
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name)
        return client.create_run(experiment).info.run_id

    def _configure(self, values: Mapping[str, Any]) -> None:
        param = self._entities.Param
        params = [param(_as_name(name), str(value)) for name, value in values.items()]
        self._has_sent(self._client.log_batch, params=params)

    def _write_scalar(self, name: str, value: float, step: int) -> None:
        milliseconds = int(time.time() * 1000)
        metric = self._entities.Metric(_as_name(name), value, milliseconds, step)
        self._metrics.append(metric)

    def _write_image(self, name: str, pixels: np.ndarray, step: int) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / f"{step}.png"
            path.write_bytes(as_png(pixels))
            folder = f"images/{_as_name(name)}"
            self._has_sent(self._client.log_artifact, str(path), folder)

    def _flush(self) -> None:
        # What is not sent waits: MLflow's own retries take minutes of training.
        while self._metrics and time.monotonic() >= self._next_try:
            batch = self._metrics[:_BATCH]
            if self._has_sent(self._client.log_batch, metrics=batch):
                del self._metrics[:_BATCH]
            else:
                self._next_try = time.monotonic() + _PAUSE_SECONDS

    def _has_sent(self, send: Callable[..., Any], *args: Any, **values: Any) -> bool:
        try:
            send(self._run_id, *args, **values)
        except self._errors.MlflowException as error:
            logger.warning("MLflow has not taken what it was sent: %s", error)
            return False
        return True

    def _end(self) -> None:
        atexit.unregister(self._end)
        self._next_try = 0.0
        self._flush()
        self._has_sent(self._client.set_terminated)


def _as_name(name: str) -> str:
    """Returns a name of signs that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name)
