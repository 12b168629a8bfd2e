"""Start-up lines about the model and the data, and the progress of a run.

A thread reads the phase of the goodput recorder, never a device. In a terminal or a
notebook, it updates one line. Elsewhere, it logs a line when a phase takes long.

In a terminal, the line does not use `Live` of Rich, because `Live` hides the cursor,
and log handlers that exist before it write into the line. Here `write` of the stream is
replaced, so all output of Python wipes the line first. In a notebook, the line is an
output of its own above the log, which is displayed again.
"""

import contextlib
import dataclasses
import functools
import importlib
import io
import logging
import os
import platform
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from armillary._format import format_bytes, format_seconds
from armillary._logging import get_console, is_terminal, logger
from armillary._process import get_process
from armillary.cluster.resolvers._resolver import TFConfigClusterResolver
from armillary.controller._outputs import ShortFloat, log_line
from armillary.controller._run import Run
from armillary.data._dataset import DistributedDataset
from armillary.distribute._strategy import Strategy
from armillary.distribute.strategies._single import DefaultStrategy
from armillary.errors import ClusterError
from armillary.goodput._stopwatch import Category
from armillary.lifeline._lines import DEBUGGER, MAKERS, is_in, read_stack
from armillary.state._summarize import ModelSummary, summarize
from armillary.trainer._runner import flatten_datasets
from armillary.trainer._standard_trainer import StandardTrainer

# Attributes in which a trainer without variables of a library keeps its parameters.
_PLACES = ("model", "params")
_PACKAGES = ["armillary", "jax", "flax", "optax", "orbax.checkpoint", "numpy", "keras"]
_MOST_MODULES = 3
_GIT_SECONDS = 5.0
_TO_END = "\x1b[K"
_REFRESH_SECONDS = 0.25
_LOOK_SECONDS = 1.0
_LONG_SECONDS = 30.0


class Display:
    """Shows the progress of a controller's calls while they run."""

    def __init__(self, run: Run, progress: bool) -> None:
        self._run = run
        self._progress = progress
        self._is_on = False
        self._has_logged = False
        # The duration at which each phase is logged. A phase may always take as long
        # as it took before.
        self._thresholds: dict[Category, float] = {}
        self._reset("train", -1, -1)

    def _reset(self, loop: str, step: int, target: int) -> None:
        self._loop = loop
        self._step = step
        self._target = target
        self._first: tuple[float, int] | None = None
        self._end = 0.0
        self._speed: float | None = None
        self._scalars: Mapping[str, float] = {}

    def log_start(self) -> None:
        """Logs the lines of `describe_start`, once."""
        if not self._has_logged:
            self._has_logged = True
            _warn_if_alone()
            for line in describe_start(self._run):
                logger.info("%s", line)

    @contextlib.contextmanager
    def on(self, loop: str, step: int, target: int = -1) -> Iterator[None]:
        """Shows the progress of a block; a block inside another block adds nothing."""
        if self._is_on or not self._progress or not get_process().is_chief:
            yield
            return
        self._is_on = True
        self._reset(loop, step, target)
        line = make_line()
        is_over = threading.Event()
        thread = threading.Thread(
            target=self._look,
            args=(threading.get_ident(), line, is_over),
            name="armillary-display",
            daemon=True,
        )
        try:
            thread.start()
            yield
        finally:
            # ORDER: the terminal comes first, because Ctrl-C may end the wait for the
            # thread.
            self._is_on = False
            if line is not None:
                line.close()
            is_over.set()
            thread.join()

    def note(self, step: int, speed: float, scalars: Mapping[str, float]) -> None:
        """Notes the results of a training loop that has ended, for the line to show."""
        now = time.perf_counter()
        if self._first is None:
            self._first = (now, step)
        began, first = self._first
        # The ETA assumes the mean pace since the first loop. It includes evaluations
        # and saves.
        pace = (now - began) / (step - first) if step > first else 1 / speed
        self._end = now + pace * (self._target - step)
        self._step = step
        self._speed = speed
        self._scalars = scalars

    def _look(
        self,
        watched: int,
        line: "LiveLine | NotebookLine | None",
        is_over: threading.Event,
    ) -> None:
        """Shows the phase of the watched thread, and how long it was seen."""
        seen: tuple[Category, float] | None = None
        since = 0.0
        stopwatch = self._run.goodput
        while not is_over.wait(_LOOK_SECONDS if line is None else _REFRESH_SECONDS):
            category = stopwatch.category
            began = stopwatch.began
            if category is None or is_in(DEBUGGER, stack := read_stack(watched)):
                continue
            if is_in(MAKERS, stack):
                category = Category.COMPILING
                began = 0.0
            if seen != (category, began):
                seen = (category, began)
                since = time.perf_counter()
            seconds = time.perf_counter() - since
            if line is not None:
                line.show(self._describe(category, seconds))
            else:
                self._say_if_long(category, seconds)

    def _say_if_long(self, category: Category, seconds: float) -> None:
        """Logs that a phase takes long: after 30 seconds, then 60, 120, and so on."""
        threshold = self._thresholds.get(category, _LONG_SECONDS)
        if seconds >= threshold:
            self._thresholds[category] = 2 * threshold
            text = f"{category.label} for {format_seconds(int(threshold))} ..."
            log_line(self._loop, self._step, text)

    def _describe(self, category: Category, seconds: float) -> str:
        parts = [f"step {self._step}"]
        if self._target > 0:
            percent = 100 * self._step // self._target
            parts = [f"step {self._step}/{self._target} ({percent}%)"]
        left = self._end - time.perf_counter()
        if left > 0:
            parts.append(f"ETA {format_seconds(int(left))}")
        if self._speed is not None:
            parts.append(f"{self._speed:.1f} steps/sec")
        duration = f" for {format_seconds(int(seconds))}" if seconds >= 1 else ""
        parts.append(f"{category.label}{duration}")
        for name in [name for name in self._scalars if name.endswith("loss")][:1]:
            parts.append(f"{name} {ShortFloat(self._scalars[name])!r}")
        return " | ".join(parts)


def make_line() -> "LiveLine | NotebookLine | None":
    """Returns the line to update, or `None` where it would be read later, in a file."""
    if has_terminal():
        return LiveLine()
    return NotebookLine() if has_notebook() else None


def has_terminal() -> bool:
    """Returns whether stderr is a terminal that can show a line that changes."""
    is_stream = isinstance(sys.stderr, io.TextIOBase) and is_terminal(sys.stderr)
    is_dumb = os.environ.get("TERM") in ("dumb", "unknown")
    return is_stream and not is_dumb and logger.isEnabledFor(logging.INFO)


class LiveLine:
    """Draws on stderr until `close`. `show` may be called from any thread."""

    def __init__(self) -> None:
        # It is reentrant, because a signal handler that prints may interrupt the thread
        # that holds it.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._stream = sys.stderr
        self._write = sys.stderr.write
        self._is_shown = False
        self._is_at_start = True
        self._is_closed = False
        self._undo = [self._divert(sys.stderr)]
        is_other = isinstance(sys.stdout, io.TextIOBase) and sys.stdout != sys.stderr
        if is_other and is_terminal(sys.stdout):
            self._undo.append(self._divert(sys.stdout))

    def show(self, text: str) -> None:
        """Draws `text` in place of the old text, cut off at the edge."""
        text = text[: get_console().width - 1]
        with self._lock:
            if self._is_at_start and not self._is_closed:
                self._put(f"\r{text}{_TO_END}\r")
                self._is_shown = True

    def close(self) -> None:
        """Wipes the line, and leaves the streams as they were."""
        with self._lock:
            self._wipe()
            self._is_closed = True
            for undo in self._undo:
                undo()

    def _divert(self, stream: Any) -> Callable[[], None]:
        """Wipes the line before writes to a stream; returns a function to undo this."""
        write = stream.write

        def wipe_and_write(text: str) -> int:
            # A forked process has a copy of the lock, which may be held forever.
            if self._is_closed or not text or os.getpid() != self._pid:
                return write(text)
            with self._lock:
                self._wipe()
                self._is_at_start = text.endswith("\n")
                return write(text)

        def undo() -> None:
            # The program may have replaced this function with its own.
            if stream.write is wipe_and_write:
                stream.write = write

        stream.write = wipe_and_write
        return undo

    def _wipe(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._put(f"\r{_TO_END}")

    def _put(self, text: str) -> None:
        try:
            self._write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The terminal is gone, or the stream is closed. Training continues.
            self._is_closed = True


def has_notebook() -> bool:
    """Returns whether a Jupyter kernel runs the program, and INFO lines are shown."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return False
    # Only the shell of a kernel has this attribute: IPython in a terminal does not.
    kernel = getattr(ipython.get_ipython(), "kernel", None)
    return kernel is not None and logger.isEnabledFor(logging.INFO)


class NotebookLine:
    """Displays a line until `close`. `show` may be called from any thread."""

    def __init__(self) -> None:
        # A signal may interrupt the thread that holds it, and its handler may print.
        self._lock = threading.RLock()
        self._is_closed = False
        # Here, because the thread that calls `show` belongs to no cell.
        display = importlib.import_module("IPython.display").display
        self._handle = display(_as_output(""), raw=True, display_id=True)

    def show(self, text: str) -> None:
        """Displays `text` in place of the text before."""
        with self._lock:
            if not self._is_closed:
                self._handle.update(_as_output(text), raw=True)

    def close(self) -> None:
        """Empties the line."""
        with self._lock:
            self._is_closed = True
            self._handle.update(_as_output(""), raw=True)


def _as_output(text: str) -> dict[str, str]:
    return {"text/plain": text}


def find_strategy(run: Run) -> Strategy | None:
    """Returns the strategy of the controller, or else of its trainer."""
    found = run.strategy or getattr(run.trainer, "strategy", None)
    return found if isinstance(found, Strategy) else None


def describe_start(run: Run) -> Iterator[str]:
    """Yields lines about the devices, parameters, batches and directories of a run."""
    strategy = find_strategy(run)
    kinds = Counter(device.device_kind for device in jax.devices())
    devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if strategy is None or type(strategy) is DefaultStrategy:
        strategy = None
        is_one = isinstance(run.trainer, StandardTrainer) and len(jax.devices()) > 1
        yield f"devices: {devices}{', of which one trains' if is_one else ''}"
    else:
        yield f"devices: {devices} | strategy: {strategy!r}"
    summary = find_parameters(run.trainer)
    if summary is not None:
        parts = [f"parameters: {summary.count:,} ({format_bytes(summary.bytes)})"]
        largest = [f"{each.name} {each.count:,}" for each in summary.modules]
        if len(largest) > 1:
            parts.append(f"largest: {', '.join(largest[:_MOST_MODULES])}")
        yield " | ".join(parts)
    parts = []
    datasets = flatten_datasets(getattr(run.trainer, "train_dataset", None))[0]
    sizes = set(map(_find_batch_size, datasets))
    size = sizes.pop() if len(sizes) == 1 else None
    if size is not None:
        num_replicas = 1 if strategy is None else strategy.num_replicas_in_sync
        is_shared = num_replicas > 1 and size % num_replicas == 0
        each = f" global, {size // num_replicas} per replica" if is_shared else ""
        parts.append(f"batch: {size}{each}")
    places = {"checkpoints": run.directory, "summaries": run.curves.summary_dir}
    parts += [f"{name}: {place}" for name, place in places.items() if place is not None]
    if parts:
        yield " | ".join(parts)


def find_parameters(trainer: Any) -> ModelSummary | None:
    """Returns the parameters of a trainer, or `None` if it has none to be found."""
    attributes = getattr(trainer, "__dict__", {})
    held = {name: attributes[name] for name in _PLACES if name in attributes}
    try:
        whole = trainer if isinstance(trainer, StandardTrainer) else held
        rows = summarize(whole).parameters
    except TypeError:
        return None  # There is nothing to count.
    kept = [
        row for row in rows if row.kind != "array" or row.path.split("/")[0] in _PLACES
    ]
    return ModelSummary(tuple(kept)) if kept else None


def _find_batch_size(dataset: Any) -> int | None:
    """Returns the examples of a global batch, if the source knows them."""
    if not isinstance(dataset, DistributedDataset):
        return getattr(dataset, "full_size", None)
    size = dataset.source.full_size
    if size is None or not dataset.per_replica_batches:
        return size
    return size * dataset.layout.num_replicas


def _warn_if_alone() -> None:
    """Warns if this worker trains alone, but `TF_CONFIG` names other workers."""
    is_set = TFConfigClusterResolver.is_present(os.environ)
    if jax.distributed.is_initialized() or not is_set:
        return
    try:
        resolver = TFConfigClusterResolver()
        plan = resolver.process_plan()
    except ClusterError:
        return  # A program that joins gets the error, and this program may not join.
    if plan.is_distributed and "ps" not in resolver.cluster_spec().jobs:
        logger.warning(
            f"`TF_CONFIG` says that this is process {plan.process_id} of "
            f"{plan.num_processes}, but the program has not joined the others. Each "
            "process trains alone, and writes to the same directories. To train "
            "together, make an `armillary.MultiWorkerMirroredStrategy()` at the top of "
            "the program."
        )


def describe_attempt(run: Run, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record of an attempt: its program, machine and hyperparameters."""
    found = {
        package.partition(".")[0]: getattr(sys.modules[package], "__version__", "")
        for package in _PACKAGES
        if package in sys.modules
    }
    main = getattr(sys.modules["__main__"], "__file__", None)
    folder = Path(main).resolve().parent if main else Path.cwd()
    found |= {
        "python": platform.python_version(),
        "devices": f"{jax.device_count()} {jax.devices()[0].device_kind}",
        "processes": get_process().count,
        "command": sys.orig_argv,
        "directory": os.getcwd(),
        "git": read_git(folder),
        "config": hyperparameters,
    }
    if (strategy := find_strategy(run)) is not None:
        found["strategy"] = type(strategy).__name__
        found["replicas"] = strategy.num_replicas_in_sync
    summary = find_parameters(run.trainer)
    if summary is not None:
        modules = [dataclasses.asdict(each) for each in summary.modules]
        sizes = {"count": summary.count, "bytes": summary.bytes}
        found["parameters"] = sizes | {"modules": modules}
    return found


@functools.cache
def read_git(folder: Path) -> dict[str, Any] | None:
    """Returns a folder's commit, and whether known files have changed, or `None`."""
    command = (
        "git --no-optional-locks describe --always --dirty --abbrev=40 --exclude=*"
    )
    try:
        ended = subprocess.run(
            command.split(),
            cwd=folder,
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=True,
            text=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    commit, _, change = ended.stdout.strip().partition("-")
    return {"commit": commit, "dirty": bool(change)}
