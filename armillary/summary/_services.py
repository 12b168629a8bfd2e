"""Summaries for Weights & Biases and for MLflow.

All writers of a service write to one run, which is kept by name in the directory of the
run, so that a program that resumes goes on with it.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from armillary._logging import logger
from armillary._optional import import_optional
from armillary._records import write_whole
from armillary.summary._tensorboard import as_png

_STEP = "global_step"
_MOST_BINS = 512  # that Weights & Biases takes
_BATCH = 1000  # Most metrics of one request to MLflow.
_PAUSE_SECONDS = 600.0


class _Directory:
    """The writer of one directory, which is in the names of what it hands on."""

    def __init__(self, service: "_Service", prefix: str) -> None:
        self._service, self._prefix = service, prefix
        self.flush, self.close = service._flush, service._close
        self.hyperparameters = service._configure

    def __getattr__(self, kind: str) -> Callable[..., None]:
        write = getattr(self._service, f"_write_{kind}")
        return lambda tag, *arguments: write(self._prefix + tag, *arguments)


class _Service(abc.ABC):
    """Makes writers to one run of a service, which ends with the last of them.

    A subclass has a method such as `_write_scalar` for each kind of value it takes.
    """

    def __init__(self, run_dir: str | os.PathLike[str], id_file: str) -> None:
        self._run_dir = Path(os.path.abspath(run_dir))
        self._id_file = self._run_dir / id_file
        self._num_writers = 0

    def __call__(self, directory: str) -> _Directory:
        """Returns the writer of one directory."""
        own = Path(os.path.abspath(directory))
        if not own.is_relative_to(self._run_dir):
            raise ValueError(
                f"`run_dir` is {str(self._run_dir)!r}, but summaries are written to "
                f"{directory!r}, which is not in it. Use a directory above all "
                "summaries of the run as `run_dir`."
            )
        if not self._num_writers:
            self._begin()
        self._num_writers += 1
        below = own.relative_to(self._run_dir).as_posix()
        return _Directory(self, "" if below == "." else f"{below}/")

    def _close(self) -> None:
        self._flush()
        self._num_writers -= 1
        if not self._num_writers:
            self._end()

    @abc.abstractmethod
    def _flush(self) -> None: ...

    @abc.abstractmethod
    def _configure(self, values: Mapping[str, Any]) -> None: ...

    @abc.abstractmethod
    def _begin(self) -> None: ...

    @abc.abstractmethod
    def _end(self) -> None: ...

    def _read_id(self) -> str | None:
        file = self._id_file
        return file.read_text().strip() or None if file.is_file() else None

    def _keep_id(self, run_id: str) -> None:
        # The next attempt finds it whole or not at all.
        path, data = epath.Path(self._id_file), f"{run_id}\n".encode()
        write_whole(path, data, f".{path.name}.{uuid.uuid4().hex}")


class WandbWriter(_Service):
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
        super().__init__(run_dir, "wandb_run_id.txt")
        self._wandb = import_optional("wandb", "Weights & Biases", "wandb")
        for name in {"id", "resume", "dir"} & set(options):
            raise TypeError(
                f"`{name}` is {options[name]!r}, but `WandbWriter` sets it, so that a "
                "run goes on where it was. Use the `run_dir` of that run instead."
            )
        self._options = options
        self._run: Any = None
        # Values of one step go together.
        self._values: dict[str, Any] = {}
        self._step = 0

    def _flush(self) -> None:
        if self._values:
            self._run.log({**self._values, _STEP: self._step})
            self._values = {}

    def _write_scalar(self, name: str, value: Any, step: int) -> None:
        if step != self._step:
            self._flush()
        self._step = step
        self._values[name] = value

    def _write_histogram(
        self, name: str, edges: np.ndarray, counts: np.ndarray, step: int
    ) -> None:
        width = -(-len(counts) // _MOST_BINS)
        starts = np.arange(0, len(counts), width)
        bins = np.add.reduceat(counts, starts), [*edges[starts], edges[-1]]
        self._write_scalar(name, self._wandb.Histogram(np_histogram=bins), step)

    def _write_image(self, name: str, pixels: np.ndarray, step: int) -> None:
        # Of an array, it would guess how bright it is.
        pillow = import_optional("PIL.Image", "Pillow", "wandb")
        image = pillow.open(io.BytesIO(as_png(pixels)))
        self._write_scalar(name, self._wandb.Image(image), step)

    def _write_text(self, name: str, text: str, step: int) -> None:
        shown = f"<pre>{html.escape(text)}</pre>"
        self._write_scalar(name, self._wandb.Html(shown), step)

    def _configure(self, values: Mapping[str, Any]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def _begin(self) -> None:
        run_id = self._read_id()
        if run_id is None:
            # Kept first: if the program is killed now, the next attempt uses it.
            run_id = uuid.uuid4().hex[:12]
            self._keep_id(run_id)
        self._run = self._wandb.init(
            id=run_id, resume="allow", dir=str(self._run_dir), **self._options
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def _end(self) -> None:
        self._run.finish()


class MlflowWriter(_Service):
    """Makes writers to one run of MLflow; a `writer_fn`.

    It is used like `WandbWriter`, and keeps the identity of the run in the same way::

        mlflow_writer = armillary.summary.MlflowWriter(
            run_dir, "digits", tracking_uri="http://mlflow.example:5000")

    A nested directory begins the name, as in `train/loss`. Images and text are
    artifacts of the run; MLflow has no histograms. Numbers that a server does not take,
    because it cannot be reached, wait for ten minutes, and training goes on.

    Args:
        run_dir: The directory of the run, at or above all summaries.
        experiment: The name of the experiment, which is made if there is none.
        tracking_uri: Where runs are kept; `None` asks MLflow's settings.
        run_name: The name of the run; `None` takes one from MLflow.

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
        run_name: str | None = None,
    ) -> None:
        super().__init__(run_dir, "mlflow_run_id.txt")
        tracking, self._entities, self._errors = (
            import_optional(f"mlflow.{name}", "MLflow", "mlflow")
            for name in ("tracking", "entities", "exceptions")
        )
        self._client = tracking.MlflowClient(tracking_uri=tracking_uri)
        self._experiment, self._run_name = experiment, run_name
        self._run_id: str | None = None
        self._metrics: list[Any] = []
        self._next_try = 0.0

    def _flush(self) -> None:
        # What is not sent waits: MLflow's own retries take minutes of training.
        if time.monotonic() >= self._next_try:
            self._send()

    def _write_scalar(self, name: str, value: float, step: int) -> None:
        milliseconds = int(time.time() * 1000)
        metric = self._entities.Metric(_as_name(name), value, milliseconds, step)
        self._metrics.append(metric)

    def _write_image(self, name: str, pixels: np.ndarray, step: int) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / f"{step}.png"
            path.write_bytes(as_png(pixels))
            folder = f"images/{_as_name(name)}"
            self._client.log_artifact(self._run_id, str(path), folder)

    def _write_text(self, name: str, text: str, step: int) -> None:
        file = f"texts/{_as_name(name)}/{step}.md"
        self._client.log_text(self._run_id, text, file)

    def _configure(self, values: Mapping[str, Any]) -> None:
        known = self._client.get_run(self._run_id).data.params
        new = {_as_name(name): str(value) for name, value in values.items()}
        changed = [n for n in sorted(new) if known.get(n, new[n]) != new[n]]
        if changed:
            logger.warning(
                "MLflow keeps the hyperparameters that a run began with: %s.",
                ", ".join(f"`{name}` is {known[name]} there" for name in changed),
            )
        params = [self._entities.Param(n, new[n]) for n in new if n not in known]
        self._client.log_batch(self._run_id, params=params)

    def _send(self) -> None:
        try:
            while self._metrics:
                self._client.log_batch(self._run_id, metrics=self._metrics[:_BATCH])
                del self._metrics[:_BATCH]
        except self._errors.MlflowException as error:
            self._next_try = time.monotonic() + _PAUSE_SECONDS
            count = len(self._metrics)
            logger.warning(
                "MLflow has not taken %d values, which wait: %s", count, error
            )

    def _begin(self) -> None:
        client, self._run_id = self._client, self._read_id()
        if self._run_id is not None:
            client.update_run(self._run_id, status="RUNNING")
        else:
            found = client.get_experiment_by_name(self._experiment)
            experiment = (
                found.experiment_id
                if found
                else client.create_experiment(self._experiment)
            )
            run = client.create_run(experiment, run_name=self._run_name)
            self._run_id = run.info.run_id
            self._keep_id(run.info.run_id)
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
