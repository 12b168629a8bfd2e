"""The first record of an attempt: what runs here, where, and with which numbers."""

import dataclasses
import os
import platform
import sys
from typing import Any

import jax

from armillary._process import get_process
from armillary.controller._curves import Curves
from armillary.controller._git import find_program_folder, read_git
from armillary.controller._start_lines import find_parameters, uses_devices

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
            **_describe_parameters(self._trainer),
        }


def _describe_parameters(trainer: Any) -> dict[str, Any]:
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
