"""The record of an attempt: its program, machine and hyperparameters."""

import dataclasses
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from armillary._process import get_process
from armillary.controller._run import Run
from armillary.controller._start_lines import (
    find_parameters,
    find_strategy,
)

_PACKAGES = ["armillary", "jax", "flax", "optax", "orbax.checkpoint", "numpy", "keras"]
_GIT_SECONDS = 5.0


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
        modules = [dataclasses.asdict(module) for module in summary.modules]
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
