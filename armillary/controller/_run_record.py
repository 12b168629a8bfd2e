"""The first record of an attempt: what runs here, where, and with which numbers.

Which state of a git repository the program is, as far as git can say at once.

What a run trains, and on what: three lines at its start.

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
from armillary.cluster.resolvers._tf_config import TFConfigClusterResolver
from armillary.controller._reports import Curves
from armillary.data._dataset import DistributedDataset
from armillary.distribute._strategy import Strategy
from armillary.distribute.strategies._single import DefaultStrategy
from armillary.errors import ClusterError
from armillary.state._summarize import ModelSummary, summarize
from armillary.trainer._loop_data import flatten_datasets
from armillary.trainer._standard_trainer import StandardTrainer

_TIMEOUT_SECONDS = 5.0


@functools.cache
def read_git(folder: str) -> dict[str, Any] | None:
    """Returns the commit of a folder, and whether files that git knows have changed.

    It is `{"commit": ..., "dirty": ...}`, or `None` without git, without a repository
    or a commit, or if git takes more than five seconds. Of a process, the first answer
    counts.
    """
    # It takes no lock and starts no daemon. The commit comes first, then changed files.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "status"]
    command += ["--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        ended = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = ended.stdout.decode(errors="replace").splitlines()
    commit = next((line.split()[2] for line in lines if "branch.oid" in line), "")
    if not commit.isalnum():  # "(initial)": nothing is committed yet.
        return None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}


def find_program_folder() -> str:
    """Returns the folder of the program's main file, or the current one."""
    main = __import__("__main__")
    file = getattr(main, "__file__", None)
    return str(Path(file).resolve().parent if file else Path.cwd())


_PACKAGES = ("jax", "flax", "optax", "orbax.checkpoint", "numpy", "keras")


class RunRecord:
    """Writes the record of a controller when it begins to train.

    It is written again where training begins at a step before one that is recorded: the
    controller has restored an earlier checkpoint.
    """

    def __init__(
        self,
        curves: Curves,
        trainer: Any,
        strategy: Any,
        hyperparameters: dict[str, Any],
    ) -> None:
        self._file, self._summary_manager = curves.file, curves.summary_manager
        self._trainer = trainer
        self._strategy, self._hyperparameters = strategy, hyperparameters
        self._has_begun = False

    def begin(self, step: int) -> None:
        """Writes the record, unless training only goes on."""
        if not self._has_begun and self._hyperparameters:
            write = getattr(self._summary_manager, "write_hyperparameters", None)
            if write is not None:
                write(self._hyperparameters)
        if not self._has_begun or step < self._file.last_step:
            if self._file.is_on:
                self._file.write("start", step, **self._describe())
                self._file.flush()
            self._file.last_step = step
        self._has_begun = True

    def _describe(self) -> dict[str, Any]:
        place = {}
        if uses_devices(self._trainer):
            place["devices"] = f"{jax.device_count()} {jax.devices()[0].device_kind}"
        if self._strategy is not None:
            place["strategy"] = type(self._strategy).__name__
            replicas = getattr(self._strategy, "num_replicas_in_sync", None)
            if replicas is not None:
                place["replicas"] = replicas
        return {
            **find_versions(),
            **place,
            "processes": get_process().count,
            "command": sys.orig_argv,
            "directory": os.getcwd(),
            "git": read_git(find_program_folder()),
            "config": self._hyperparameters,
            **_describe_numbers(self._trainer),
        }


def _describe_numbers(trainer: Any) -> dict[str, Any]:
    summary = find_parameters(trainer)
    if summary is None or not summary.count:
        return {}
    modules = [dataclasses.asdict(each) for each in summary.modules]
    sizes = {"count": summary.count, "bytes": summary.bytes, "modules": modules}
    return {"parameters": sizes}


def find_versions() -> dict[str, str]:
    """Returns the versions of what is loaded, by name."""
    versions = {"armillary": sys.modules["armillary"].__version__}
    for package in _PACKAGES:
        if package in sys.modules:
            name = package.partition(".")[0]
            versions[name] = getattr(sys.modules[package], "__version__", "unknown")
    return {**versions, "python": platform.python_version()}


_MOST_MODULES = 3
# Where a trainer without variables of a library keeps what it trains.
_PLACES = ("model", "params")


def log_start(trainer: Any, strategy: Any, directories: dict[str, str | None]) -> None:
    """Logs devices and strategy; parameters; batches and directories by their use.

    Without a strategy of the controller, it is that of the trainer.
    """
    _warn_if_alone()
    if strategy is None:
        strategy = getattr(trainer, "strategy", None)
    is_chosen = isinstance(strategy, Strategy) and type(strategy) is not DefaultStrategy
    strategy = strategy if is_chosen else None
    for parts in (
        _describe_devices(trainer, strategy),
        _describe_parameters(trainer),
        [*_describe_batch(trainer, strategy), *_describe_places(directories)],
    ):
        line = " | ".join(parts)
        if line:
            logger.info("%s", line)


def _warn_if_alone() -> None:
    """Warns of a worker that trains without the others which `TF_CONFIG` names.

    Each of them would write to the same directories.
    """
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
            "joined the others: each trains alone, and writes to the same directories "
            "unless you name others. To train together, make an "
            "`armillary.MultiWorkerMirroredStrategy()` at the top of the program.",
            plan.process_id,
            plan.num_processes,
        )


def _describe_devices(trainer: Any, strategy: Strategy | None) -> Iterator[str]:
    if uses_devices(trainer):
        kinds = Counter(device.device_kind for device in jax.devices())
        shown = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        yield f"devices: {shown}"
    if strategy is not None:
        yield f"strategy: {strategy!r}"


def uses_devices(trainer: Any) -> bool:
    """Returns whether JAX may be asked for its devices.

    That starts its threads, and a trainer written by hand may want to fork.
    """
    return isinstance(trainer, StandardTrainer) or xla_bridge.backends_are_initialized()


def find_parameters(trainer: Any) -> ModelSummary | None:
    """Returns the parameters of a trainer, as far as they can be told."""
    attributes = vars(trainer) if hasattr(trainer, "__dict__") else {}
    try:
        if isinstance(trainer, StandardTrainer):
            copies = tuple(f"{name}/" for name in _find_averages(attributes))
            rows = [
                row
                for row in summarize(trainer).parameters
                if not row.path.startswith(copies)
            ]
            has_variables = any(row.kind != "array" for row in rows)
            places = [row for row in rows if row.path.split("/")[0] in _PLACES]
            return ModelSummary(tuple(rows if has_variables else places))
        place = next((name for name in _PLACES if name in attributes), None)
        return None if place is None else summarize(attributes[place])
    except TypeError:
        return None  # There is nothing to count.


def _find_averages(attributes: dict[str, Any]) -> list[str]:
    """Returns which attributes hold averages of parameters, which are no more of them.

    Their class needs Flax, so it is loaded where there is one.
    """
    module = sys.modules.get("armillary.trainer._moving_average")
    kind = () if module is None else module.ExponentialMovingAverage
    return [name for name, value in attributes.items() if isinstance(value, kind)]


def _describe_parameters(trainer: Any) -> Iterator[str]:
    summary = find_parameters(trainer)
    if summary is None or not summary.count:
        return
    yield f"parameters: {summary.count:,} ({format_bytes(summary.bytes)})"
    modules = summary.modules
    if len(modules) > 1:
        largest = (f"{each.name} {each.count:,}" for each in modules[:_MOST_MODULES])
        yield f"largest: {', '.join(largest)}"


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


def _describe_batch(trainer: Any, strategy: Strategy | None) -> Iterator[str]:
    sizes = {_find_batch_size(dataset) for dataset in _find_datasets(trainer)}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None:
        return
    num_replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    if num_replicas > 1 and size % num_replicas == 0:
        yield f"batch: {size} global, {size // num_replicas} per replica"
    else:
        yield f"batch: {size}"


def _find_batch_size(dataset: Any) -> int | None:
    """Returns the examples of a global batch, if the source knows them."""
    if not isinstance(dataset, DistributedDataset):
        return getattr(dataset, "full_size", None)
    size = dataset.source.full_size
    if size is None or not dataset.per_replica_batches:
        return size
    return size * dataset.layout.num_replicas


def _describe_places(directories: dict[str, str | None]) -> Iterator[str]:
    for name, directory in directories.items():
        if directory is not None:
            is_inside = directory.startswith(os.getcwd() + os.sep)
            place = os.path.relpath(directory) if is_inside else directory
            yield f"{name}: {place}"
