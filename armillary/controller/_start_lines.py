"""Log lines about the model, the data and the devices, before training begins."""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from armillary._format import format_bytes
from armillary._logging import logger
from armillary.cluster.resolvers._resolver import TFConfigClusterResolver
from armillary.controller._run import Run
from armillary.data._dataset import DistributedDataset
from armillary.data._layout import count_own_batches
from armillary.distribute._strategy import Strategy
from armillary.distribute.strategies._single import DefaultStrategy
from armillary.errors import ClusterError
from armillary.state._summarize import ArrayRow, ModelSummary, summarize
from armillary.trainer._datasets import flatten_datasets
from armillary.trainer._standard_trainer import StandardTrainer

# Attributes in which a trainer without variables of a library keeps its parameters.
_PLACES = ("model", "params")
_MAX_MODULES = 3


def find_strategy(run: Run) -> Strategy | None:
    """Returns the strategy of the controller, or else of its trainer."""
    found = run.strategy or getattr(run.trainer, "strategy", None)
    return found if isinstance(found, Strategy) else None


def describe_start(run: Run) -> Iterator[str]:
    """Yields lines about the devices, parameters, batches and directories of a run."""
    strategy = find_strategy(run)
    if type(strategy) is DefaultStrategy:
        strategy = None
    yield _describe_devices(run, strategy)

    summary = find_parameters(run.trainer)
    if summary is not None:
        yield _describe_parameters(summary)

    parts: list[str] = []
    size = _find_only_batch_size(run.trainer)
    if size is not None:
        parts.append(_describe_batch(size, strategy))
    places = {"checkpoints": run.directory, "summaries": run.curves.summary_dir}
    parts += [f"{name}: {place}" for name, place in places.items() if place is not None]
    if parts:
        yield " | ".join(parts)


def _describe_devices(run: Run, strategy: Strategy | None) -> str:
    kinds = Counter(device.device_kind for device in jax.devices())
    devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if strategy is not None:
        return f"devices: {devices} | strategy: {strategy!r}"
    is_one = isinstance(run.trainer, StandardTrainer) and len(jax.devices()) > 1
    return f"devices: {devices}{', of which one trains' if is_one else ''}"


def _describe_parameters(summary: ModelSummary) -> str:
    parts = [f"parameters: {summary.count:,} ({format_bytes(summary.bytes)})"]
    largest = [f"{module.name} {module.count:,}" for module in summary.modules]
    if len(largest) > 1:
        parts.append(f"largest: {', '.join(largest[:_MAX_MODULES])}")
    return " | ".join(parts)


def _describe_batch(size: int, strategy: Strategy | None) -> str:
    num_replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    is_shared = num_replicas > 1 and size % num_replicas == 0
    if not is_shared:
        return f"batch: {size}"
    return f"batch: {size} global, {size // num_replicas} per replica"


def find_parameters(trainer: Any) -> ModelSummary | None:
    """Returns the parameters of a trainer, or `None` if it has none to be found."""
    attributes = getattr(trainer, "__dict__", {})
    held = {name: attributes[name] for name in _PLACES if name in attributes}
    try:
        whole = trainer if isinstance(trainer, StandardTrainer) else held
        rows = summarize(whole).parameters
    except TypeError:
        return None  # There is nothing to count.
    kept: list[ArrayRow] = []
    for row in rows:
        attribute = row.path.split("/")[0]
        if row.kind != "array" or attribute in _PLACES:
            kept.append(row)
    return ModelSummary(tuple(kept)) if kept else None


def _find_only_batch_size(trainer: Any) -> int | None:
    """Returns the size of batches, if all training data has the same."""
    datasets, _ = flatten_datasets(getattr(trainer, "train_dataset", None))
    sizes = set(map(_find_batch_size, datasets))
    return sizes.pop() if len(sizes) == 1 else None


def _find_batch_size(dataset: Any) -> int | None:
    """Returns the examples of a global batch, if the source knows them."""
    if not isinstance(dataset, DistributedDataset):
        return getattr(dataset, "full_size", None)
    size = dataset.source.full_size
    if size is None or not dataset.per_replica_batches:
        return size
    return size * count_own_batches(dataset.layout)


def warn_if_alone() -> None:
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
