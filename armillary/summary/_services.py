"""Summaries for Weights & Biases.

What writers to services share: one run for all, which goes on when it is resumed.

Summaries for MLflow.
"""

import abc
import atexit
import html
import io
import os
import re
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from armillary._logging import logger
from armillary._optional import import_optional
from armillary.summary._kinds import as_png


class Service(abc.ABC):
    """Makes writers to one run of a service, which ends with the last of them."""

    _writer_type: "type[ServiceWriter]"

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._run_dir = Path(os.path.abspath(run_dir))
        self._num_writers = 0

    def __call__(self, directory: str) -> "ServiceWriter":
        """Returns the writer of one directory."""
        prefix = _find_prefix(self._run_dir, directory)
        if not self._num_writers:
            self._begin()
        self._num_writers += 1
        return self._writer_type(self, prefix)

    @abc.abstractmethod
    def flush(self) -> None:
        """Sends the values."""

    def close(self) -> None:
        """Ends the run with the last of its writers."""
        self.flush()
        self._num_writers -= 1
        if not self._num_writers:
            self._end()

    @abc.abstractmethod
    def _begin(self) -> None: ...

    @abc.abstractmethod
    def _end(self) -> None: ...


class ServiceWriter:
    """Writes the summaries of one directory."""

    def __init__(self, service: Any, prefix: str) -> None:
        self._service, self._prefix = service, prefix
        self.flush, self.close = service.flush, service.close
        self.hyperparameters = service.configure

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Writes one value."""
        self._log(tag, value, step)

    def _log(self, tag: str, value: Any, step: int) -> None:
        self._service.log(self._prefix + tag, value, step)


def read_id(path: Path) -> str | None:
    """Returns what an earlier attempt has kept, or `None`."""
    return path.read_text().strip() or None if path.is_file() else None


def keep_id(path: Path, run_id: str) -> None:
    """Keeps a name for the next attempt, which finds it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    unfinished.write_text(run_id + "\n")
    unfinished.replace(path)


def _find_prefix(run_dir: Path, directory: str) -> str:
    # What the names of a directory of summaries begin with.
    own = Path(os.path.abspath(directory))
    if not own.is_relative_to(run_dir):
        raise ValueError(
            f"`run_dir` is {str(run_dir)!r}, but summaries are written to "
            f"{directory!r}, which is not in it. Use the directory of the run, above "
            "all of its summaries, as `run_dir`."
        )
    prefix = own.relative_to(run_dir).as_posix()
    return "" if prefix == "." else f"{prefix}/"


MLFLOW_ID_FILE = "mlflow_run_id.txt"
_BATCH = 1000  # Most metrics of one request.
_PAUSE_SECONDS = 600.0


class _MlflowWriter(ServiceWriter):
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

    _writer_type = _MlflowWriter

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        experiment: str = "Default",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
    ) -> None:
        super().__init__(run_dir)
        tracking = import_optional("mlflow.tracking", "MLflow", "mlflow")
        self._entities = import_optional("mlflow.entities", "MLflow", "mlflow")
        self._errors = import_optional("mlflow.exceptions", "MLflow", "mlflow")
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
        path, client = self._run_dir / MLFLOW_ID_FILE, self._client
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


WANDB_ID_FILE = "wandb_run_id.txt"
_STEP = "global_step"
_MOST_BINS = 512


class _WandbWriter(ServiceWriter):
    def histogram(
        self, tag: str, edges: np.ndarray, counts: np.ndarray, step: int
    ) -> None:
        # Of bins, so many are allowed there.
        width = -(-len(counts) // _MOST_BINS)
        starts = np.arange(0, len(counts), width)
        bins = np.add.reduceat(counts, starts), [*edges[starts], edges[-1]]
        self._log(tag, self._service.wandb.Histogram(np_histogram=bins), step)

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        image = import_optional("PIL.Image", "Pillow", "wandb")
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

    _writer_type = _WandbWriter

    def __init__(self, run_dir: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(run_dir)
        self.wandb = import_optional("wandb", "Weights & Biases", "wandb")
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
        path = self._run_dir / WANDB_ID_FILE
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
