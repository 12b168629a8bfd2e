"""Summaries for MLflow."""

import atexit
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from armillary._logging import logger
from armillary.summary._png import as_png
from armillary.summary._service import (
    Service,
    ServiceWriter,
    import_service,
    keep_id,
    read_id,
)

ID_FILE = "mlflow_run_id.txt"
_BATCH = 1000  # Most metrics of one request.
_PAUSE_SECONDS = 600.0


class _Writer(ServiceWriter):
    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        name = f"images/{self._prefix}{tag}/{step}.png"
        self._service.write_file(name, as_png(pixels))

    def text(self, tag: str, text: str, step: int) -> None:
        name = f"texts/{self._prefix}{tag}/{step}.md"
        self._service.write_file(name, text.encode())


class MlflowWriter(Service):
    """Makes writers to one run of MLflow; a `writer_fn`.

    All managers that it is given to write to the same run. Its identity is kept in the
    directory of the run, so a program that resumes goes on with it::

        mlflow_writer = armillary.summary.MlflowWriter(
            run_dir, "digits", tracking_uri="http://mlflow.example:5000")
        controller = armillary.Controller(
            ..., summary_manager=armillary.summary.SummaryManager(
                run_dir / "train",
                writer_fn=[armillary.summary.TensorBoardWriter, mlflow_writer]))

    A nested directory begins the name: the loss above is `train/loss`. Images and text
    are artifacts of the run; MLflow has no histograms. Numbers that a server does not
    take, because it cannot be reached, wait for ten minutes, and training goes on.

    Args:
        run_dir: The directory of the run, at or above all summaries.
        experiment: The name of the experiment, which is made if there is none.
        tracking_uri: Where runs are kept; `None` asks MLflow's settings.
        run_name: The name of the run; `None` takes one from MLflow.

    Raises:
        ImportError: If MLflow is not installed.
        ValueError: When a manager writes outside of `run_dir`.
    """

    _writer_type = _Writer

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        experiment: str = "Default",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
    ) -> None:
        super().__init__(run_dir)
        tracking = import_service("mlflow.tracking", "MLflow", "mlflow")
        self._entities = import_service("mlflow.entities", "MLflow", "mlflow")
        self._errors = import_service("mlflow.exceptions", "MLflow", "mlflow")
        self._client = tracking.MlflowClient(tracking_uri=tracking_uri)
        self._experiment, self._run_name = experiment, run_name
        self._run_id: str | None = None
        self._metrics: list[Any] = []
        self._next_try = 0.0

    def log(self, name: str, value: float, step: int) -> None:
        """Takes a number."""
        milliseconds = int(time.time() * 1000)
        metric = self._entities.Metric(_as_name(name), value, milliseconds, step)
        self._metrics.append(metric)

    def flush(self) -> None:
        """Sends the numbers; what cannot be sent now waits."""
        # MLflow's own retries take minutes, in which nothing trains.
        if time.monotonic() >= self._next_try:
            self._send()

    def write_file(self, name: str, data: bytes) -> None:
        """Keeps a file with the run."""
        folder, _, file = _as_name(name).rpartition("/")
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / file
            path.write_bytes(data)
            self._client.log_artifact(self._run_id, str(path), folder)

    def configure(self, values: Mapping[str, Any]) -> None:
        """Sets hyperparameters; MLflow keeps those that are there."""
        known = self._client.get_run(self._run_id).data.params
        new = {_as_name(name): str(value) for name, value in values.items()}
        changed = sorted(
            name for name in new if known.get(name, new[name]) != new[name]
        )
        if changed:
            logger.warning(
                "MLflow keeps the hyperparameters that a run began with: %s.",
                ", ".join(f"`{name}` is {known[name]} there" for name in changed),
            )
        params = [
            self._entities.Param(name, value)
            for name, value in new.items()
            if name not in known
        ]
        self._client.log_batch(self._run_id, params=params)

    def _send(self) -> None:
        try:
            while self._metrics:
                self._client.log_batch(self._run_id, metrics=self._metrics[:_BATCH])
                del self._metrics[:_BATCH]
        except self._errors.MlflowException as error:
            self._next_try = time.monotonic() + _PAUSE_SECONDS
            logger.warning(
                "MLflow has not taken %d values, which wait: %s",
                len(self._metrics),
                error,
            )

    def _begin(self) -> None:
        path, client = self._run_dir / ID_FILE, self._client
        self._run_id = read_id(path)
        if self._run_id is not None:
            client.update_run(self._run_id, status="RUNNING")
        else:
            found = client.get_experiment_by_name(self._experiment)
            experiment_id = (
                found.experiment_id
                if found
                else client.create_experiment(self._experiment)
            )
            run = client.create_run(experiment_id, run_name=self._run_name)
            self._run_id = run.info.run_id
            keep_id(path, run.info.run_id)
        # Nobody closes the manager of a program that simply ends.
        atexit.register(self._end)

    def _end(self) -> None:
        if self._run_id is not None:
            atexit.unregister(self._end)
            self._send()
            try:
                self._client.set_terminated(self._run_id)
            except self._errors.MlflowException as error:
                logger.warning("MLflow does not know that the run has ended: %s", error)
            self._run_id = None


def _as_name(name: str) -> str:
    """Returns a name of signs that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name)
