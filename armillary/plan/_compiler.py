"""Compiles a program for other devices, in a separate process."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
from jax import export

from armillary._jaxpr import source_line, walk_equations
from armillary.errors import PlanError
from armillary.plan._targets import Topology
from armillary.trainer._described import DescribedLoop
from armillary.xla._lowerings import partitioned

WHEELS_VARIABLE = "ARMILLARY_PLAN_WHEELS"
_WORKER = Path(__file__).with_name("_compile_worker.py")
_PACKAGES = {"tpu": ("libtpu",), "cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin")}
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Ran out of memory", "exceeds the limit")


@dataclass(frozen=True)
class Compiled:
    """The compiler's report about a program.

    Attributes:
        memory: Bytes on each device, by kind.
        seconds: The time of the compiler.
        islands: The group of each device of the mesh, if groups have slow links between
            them; else empty.
        text: The program.
        report: XLA's reports on the memory of the program.
    """

    memory: dict[str, int]
    seconds: float
    islands: list[int]
    text: str
    report: str


def find_wheels(platform: str) -> str | None:
    """Returns the folder that has the compiler for a platform; `None` if installed."""
    if platform == "cpu":
        return None
    folder = os.environ.get(WHEELS_VARIABLE)
    names = _PACKAGES[platform]
    if folder and any((Path(folder) / name).is_dir() for name in names):
        return str(Path(folder).resolve())
    if any(importlib.util.find_spec(name) for name in names):
        return None
    version = jax.__version__
    package = f"jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
    if platform == "tpu":  # The release that one of JAX's extras requires.
        wanted = importlib.metadata.requires("jax") or ()
        found = (text.partition(";")[0] for text in wanted if "libtpu" in text)
        package = repr(next(found, "libtpu").strip())
    raise PlanError(
        f"There is no compiler for {platform} ({', '.join(names)}), here or in the "
        f"folder that {WHEELS_VARIABLE} names ({folder!r}). You need no such device "
        "or driver. Install the compiler into a separate folder:\n"
        f"  pip install --no-deps --target plan-wheels {package}\n"
        f"  export {WHEELS_VARIABLE}=plan-wheels\n"
        "Or plan for virtual CPU devices, such as `cpu:64`, whose compiler is here. Or "
        "plan without a compiler: `abstract=True`, `--abstract`."
    )


def export_loop(loop: DescribedLoop, platform: str) -> bytes:
    """Lowers a loop; needs no compiler for the platform."""
    for equation in walk_equations(loop.step):
        name = equation.primitive.name
        if "callback" in name or name == "debug_print":
            raise PlanError(
                f"`train_step` calls Python from the device ({name}, at "
                f"{source_line(equation)}), which ties it to this machine. Leave "
                "it out of the step to plan it, as for a fast run."
            )
    split = loop.split
    with contextlib.nullcontext() if split is None else partitioned(split):
        exported = export.export(loop.fn, platforms=(platform,))(*loop.types)
    return bytes(exported.serialize())


def _make_environment(platform: str) -> dict[str, str]:
    """Returns the environment of the process that compiles for a platform."""
    folders = [
        find_wheels(platform),
        *(entry for entry in sys.path if entry.endswith("-packages")),
        os.environ.get("PYTHONPATH"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "TPU_SKIP_MDS_QUERY": "1",  # The worker has no TPU, and must not look for one.
        # The lock of a TPU would also keep two plans from running at the same time.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    # The compiler for another platform may not know a flag, and then ends the process.
    environment.pop("XLA_FLAGS", None)
    return environment


def compile_loop(loop: DescribedLoop, topology: Topology) -> Compiled | None:
    """Returns a loop compiled for a topology; `None` if it cannot fit into memory."""
    target = topology.target
    assert target is not None
    request = {
        "platform": target.platform,
        "topology": topology.xla_name,
        "config": target.config,
        "num_devices": topology.num_devices,
        "num_slices": topology.num_slices,
        "num_groups": topology.num_groups,
        "across": [loop.dcn.get(axis, 1) for axis in loop.mesh.axis_names],
        "mesh_shape": list(loop.mesh.axis_sizes),
        "mesh_axes": list(loop.mesh.axis_names),
        "compiler_options": loop.compiler_options,
    }
    environment = _make_environment(target.platform)
    with tempfile.TemporaryDirectory(prefix="armillary-plan-") as name:
        work = Path(name)
        (work / "request.json").write_text(json.dumps(request))
        (work / "program.bin").write_bytes(export_loop(loop, target.platform))
        process = subprocess.run(
            [sys.executable, str(_WORKER), name],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if process.returncode == 0:
            answer = json.loads((work / "answer.json").read_text())
            text = (work / "hlo.txt").read_text()
            report = (work / "peak.txt").read_text()
            return Compiled(**answer, text=text, report=report)
    if any(words in process.stderr for words in _OUT_OF_MEMORY):
        return None
    raise PlanError(
        f"`topology` is {topology.text!r}, but the compiler for {target.platform} "
        f"failed ({process.returncode}). Its last words were:\n"
        f"{process.stderr[-2000:].strip()}"
    )
