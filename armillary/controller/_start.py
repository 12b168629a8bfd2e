"""What a run trains, and on what: lines at its start, and the record of an attempt.

What is not known without reading data, or starting devices, is left out.
"""

import dataclasses
import functools
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import xla_bridge  # noqa: TID251

from armillary._format import format_bytes
from armillary._logging import logger
from armillary._process import get_process
from armillary.cluster.resolvers._resolver import TFConfigClusterResolver
from armillary.controller._run import Run
from armillary.data._dataset import DistributedDataset
from armillary.distribute._strategy import Strategy
from armillary.distribute.strategies._single import DefaultStrategy
from armillary.errors import ClusterError
from armillary.state._summarize import ModelSummary, summarize
from armillary.trainer._runner import flatten_datasets
from armillary.trainer._standard_trainer import StandardTrainer

_MOST_MODULES = 3
_GIT_SECONDS = 5.0
# Where a trainer without variables of a library keeps what it trains.
_PLACES = ("model", "params")
_PACKAGES = ("jax", "flax", "optax", "orbax.checkpoint", "numpy", "keras")


class Start:
    """Tells what one controller trains, when it begins to."""

    def __init__(self, run: Run, hyperparameters: dict[str, Any]) -> None:
        self._run, self._hyperparameters = run, hyperparameters
        self._has_logged = self._has_begun = False

    def log(self) -> None:
        """Logs devices and strategy; parameters; batches and directories; once."""
        if self._has_logged:
            return
        self._has_logged = True
        _warn_if_alone()
        run = self._run
        strategy = run.strategy
        if strategy is None:  # It is that of the trainer.
            strategy = getattr(run.trainer, "strategy", None)
        if not isinstance(strategy, Strategy) or type(strategy) is DefaultStrategy:
            strategy = None
        for parts in (
            _describe_place(run.trainer, strategy),
            _describe_parameters(run.trainer),
            _describe_data(run, strategy),
        ):
            line = " | ".join(parts)
            if line:
                logger.info("%s", line)

    def record(self, step: int) -> None:
        """Writes the first record of an attempt, unless training only goes on."""
        file: Any = self._run.curves.file
        manager: Any = self._run.curves.summary_manager
        is_first, self._has_begun = not self._has_begun, True
        takes = hasattr(manager, "write_hyperparameters")
        if is_first and self._hyperparameters and takes:
            manager.write_hyperparameters(self._hyperparameters)
        # Training may go on at an earlier step, if a checkpoint was restored.
        if is_first or step < file.last_step:
            if file.is_on:
                file.write("start", step, **self._describe())
                file.flush()
            file.last_step = step

    def _describe(self) -> dict[str, Any]:
        """Returns what runs here, where, and with which numbers."""
        strategy, place = self._run.strategy, {}
        if uses_devices(self._run.trainer):
            place["devices"] = f"{jax.device_count()} {jax.devices()[0].device_kind}"
        if strategy is not None:
            place["strategy"] = type(strategy).__name__
            if hasattr(strategy, "num_replicas_in_sync"):
                place["replicas"] = strategy.num_replicas_in_sync
        versions = {"armillary": sys.modules["armillary"].__version__}
        for package in _PACKAGES:
            if package in sys.modules:
                name = package.partition(".")[0]
                versions[name] = getattr(sys.modules[package], "__version__", "unknown")
        main = getattr(sys.modules["__main__"], "__file__", None)
        folder = Path(main).resolve().parent if main else Path.cwd()
        summary, sizes = find_parameters(self._run.trainer), {}
        if summary is not None:
            modules = [dataclasses.asdict(each) for each in summary.modules]
            counts = {"count": summary.count, "bytes": summary.bytes}
            sizes["parameters"] = {**counts, "modules": modules}
        return {
            **versions,
            "python": platform.python_version(),
            **place,
            "processes": get_process().count,
            "command": sys.orig_argv,
            "directory": os.getcwd(),
            "git": read_git(folder),
            "config": self._hyperparameters,
            **sizes,
        }


@functools.cache
def read_git(folder: Path) -> dict[str, Any] | None:
    """Returns a folder's commit, and whether known files have changed, or `None`."""
    # It takes no lock and starts no daemon. The commit comes first, then changed files.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "status"]
    command += ["--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        ended = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = ended.stdout.decode(errors="replace").splitlines()
    commit = next((line.split()[2] for line in lines if "branch.oid" in line), "")
    if not commit.isalnum():  # "(initial)": nothing is committed yet.
        return None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}


def _warn_if_alone() -> None:
    """Warns of a worker that trains without the others which `TF_CONFIG` names."""
    is_set = TFConfigClusterResolver.is_present(os.environ)
    if jax.distributed.is_initialized() or not is_set:
        return
    try:
        resolver = TFConfigClusterResolver()
        plan = resolver.process_plan()
    except ClusterError:
        return  # Who wants to join the others is told. This program may do without.
    if plan.is_distributed and "ps" not in resolver.cluster_spec().jobs:
        logger.warning(
            "`TF_CONFIG` says that this is process %s of %s, but the program has not "
            "joined the others: each trains alone, and writes to the same directories. "
            "To train together, make an `armillary.MultiWorkerMirroredStrategy()` at "
            "the top of the program.",
            plan.process_id,
            plan.num_processes,
        )


def uses_devices(trainer: Any) -> bool:
    """Returns whether JAX may be asked for its devices: a trainer may want to fork."""
    return isinstance(trainer, StandardTrainer) or xla_bridge.backends_are_initialized()


def _describe_place(trainer: Any, strategy: Strategy | None) -> Iterator[str]:
    if uses_devices(trainer):
        kinds = Counter(device.device_kind for device in jax.devices())
        shown = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        yield f"devices: {shown}"
    if strategy is not None:
        yield f"strategy: {strategy!r}"


def find_parameters(trainer: Any) -> ModelSummary | None:
    """Returns the parameters of a trainer, as far as they can be told."""
    attributes = vars(trainer) if hasattr(trainer, "__dict__") else {}
    is_ours = isinstance(trainer, StandardTrainer)
    model = next((attributes[name] for name in _PLACES if name in attributes), None)
    if not is_ours and model is None:
        return None
    try:
        summary = summarize(trainer if is_ours else model)
    except TypeError:
        return None  # There is nothing to count.
    if is_ours:
        # An average of parameters is no more of them. Its class needs Flax.
        module = sys.modules.get("armillary.trainer._moving_average")
        average = getattr(module, "ExponentialMovingAverage", ())
        tops = {row: row.path.split("/")[0] for row in summary.parameters}
        rows = [r for r in tops if not isinstance(attributes.get(tops[r]), average)]
        if all(row.kind == "array" for row in rows):
            rows = [row for row in rows if tops[row] in _PLACES]
        summary = ModelSummary(tuple(rows))
    return summary if summary.count else None


def _describe_parameters(trainer: Any) -> Iterator[str]:
    summary = find_parameters(trainer)
    if summary is not None:
        yield f"parameters: {summary.count:,} ({format_bytes(summary.bytes)})"
        largest = [f"{each.name} {each.count:,}" for each in summary.modules]
        if len(largest) > 1:
            yield f"largest: {', '.join(largest[:_MOST_MODULES])}"


def repeats_for_ever(trainer: Any) -> bool:
    """Returns whether it is known that the data of a trainer does not end."""
    datasets = _find_datasets(trainer)
    return bool(datasets) and all(
        getattr(dataset, "is_endless", False) for dataset in datasets
    )


def _find_datasets(trainer: Any) -> list[Any]:
    if not isinstance(trainer, StandardTrainer):
        return []
    # A trainer that has not called `super().__init__` says so when it trains.
    return flatten_datasets(getattr(trainer, "train_dataset", []))[0]


def _describe_data(run: Run, strategy: Strategy | None) -> Iterator[str]:
    sizes = {_find_batch_size(dataset) for dataset in _find_datasets(run.trainer)}
    size = sizes.pop() if len(sizes) == 1 else None
    num_replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    if size is not None:
        is_shared = num_replicas > 1 and size % num_replicas == 0
        each = f" global, {size // num_replicas} per replica" if is_shared else ""
        yield f"batch: {size}{each}"
    places = {"checkpoints": run.directory, "summaries": run.curves.summary_dir}
    for name, directory in places.items():
        if directory is not None:
            is_inside = directory.startswith(os.getcwd() + os.sep)
            yield f"{name}: {os.path.relpath(directory) if is_inside else directory}"


def _find_batch_size(dataset: Any) -> int | None:
    """Returns the examples of a global batch, if the source knows them."""
    if not isinstance(dataset, DistributedDataset):
        return getattr(dataset, "full_size", None)
    size = dataset.source.full_size
    if size is None or not dataset.per_replica_batches:
        return size
    return size * dataset.layout.num_replicas
