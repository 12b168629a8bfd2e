"""The machine a report comes from."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

_PROBE = (
    "import jax; device = jax.devices()[0]; "
    "print(device.platform, len(jax.devices()), device.device_kind, sep='\\n')"
)


def describe_machine() -> dict[str, Any]:
    """Returns what a reader needs to judge figures: processor, cores, system."""
    return {
        "cpu": _cpu_model(),
        "cores": _count_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "load_at_start": os.getloadavg()[0],
    }


def find_device() -> dict[str, Any]:
    """Returns JAX's default platform, asked in a process of its own.

    The parent holds no device: on a GPU its memory would be missing to the workers.

    Raises:
        RuntimeError: If JAX finds no device.
    """
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=300
    )
    lines = probe.stdout.splitlines()[-3:]
    if probe.returncode or len(lines) < 3:
        raise RuntimeError(
            "JAX finds no device, so nothing can be measured. See what "
            f"`python -c 'import jax; jax.devices()'` says:\n{probe.stderr[-1000:]}"
        )
    return {"platform": lines[0], "count": int(lines[1]), "kind": lines[2]}


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor()
    return platform.processor() or platform.machine()


def _count_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # Not on every system.
        return os.cpu_count() or 1
