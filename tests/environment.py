"""Sets the environment of all tests: eight CPU devices, strict JAX, a shared cache.

It is imported before JAX, because JAX reads the environment once. Processes that a test
starts inherit it.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
OPTIMIZE_LESS = "jax_disable_most_optimizations"
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"

if DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} {DEVICE_COUNT_FLAG}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")
# Output of Ray's workers and old logs of a TPU compiler could appear at any moment.
os.environ.setdefault("RAY_LOG_TO_DRIVER", "0")
# Ray gives its workers a low priority. Next to a busy program, they would stand still.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# A failing test shows where in the library it fails.
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
# One cache for all workers and all runs: most of the suite's time is compilation.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".pytest_cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Older releases take a program from the cache for one of another machine and say so, in
# lines of C++ that no test expects. A process that read such a program hung once.
JAX_RELEASE = tuple(map(int, version("jax").split(".")[:3]))
CAN_CACHE = JAX_RELEASE >= (0, 10, 2)
if not CAN_CACHE:
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
# The results are the same except for the last bits. Tests that need these use the
# fixture `optimized`.
os.environ.setdefault(OPTIMIZE_LESS.upper(), "1")
# Threads of OpenBLAS wait in loops for work: a tenth of the start of a process.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# XLA's emitters of fused loops take half of the time that it compiles programs as small
# as these, and to divide one over threads takes a fifth of the rest.
QUICK_COMPILATION = {
    "xla_cpu_use_fusion_emitters": False,  # unknown to JAX 0.11 and later
    "xla_cpu_parallel_codegen_split_count": 1,
}
KNOWN_OPTIONS_PROGRAM = """
import json, sys
import jax

lowered = jax.jit(lambda x: x + 1).lower(1.0)
known = {}
for name, value in json.loads(sys.argv[1]).items():
    try:
        lowered.compile(compiler_options={name: value})
        known[name] = value
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
print(json.dumps(known))
"""
FLAGS_MARK = "ARMILLARY_TEST_FLAGS"


def find_known(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that the installed XLA knows.

    An unknown flag in `XLA_FLAGS` ends a process. An unknown option of one compilation
    is an exception, so a process without these flags compiles once with each option.
    """
    answer = subprocess.run(
        [sys.executable, "-c", KNOWN_OPTIONS_PROGRAM, json.dumps(options)],
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "0"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(answer.stdout)


# The workers of pytest-xdist and the processes of tests inherit the flags.
if FLAGS_MARK not in os.environ:
    known = find_known(QUICK_COMPILATION)
    flags = [f"--{name}={str(value).lower()}" for name, value in known.items()]
    os.environ[FLAGS_MARK] = " ".join(flags)
    os.environ["XLA_FLAGS"] += " " + os.environ[FLAGS_MARK]


def forget_devices() -> dict[str, str]:
    """Returns the environment for a process that chooses its devices itself."""
    flags = os.environ["XLA_FLAGS"].split()
    kept = " ".join(flag for flag in flags if DEVICE_COUNT_FLAG not in flag)
    return {**os.environ, "XLA_FLAGS": kept}
