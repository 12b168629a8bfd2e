"""Shared settings of all tests: eight CPU devices, strict JAX, and a few fixtures.

The environment is set before JAX is imported, because JAX reads it once. Processes that
a test starts inherit it.
"""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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

import hypothesis
import jax
import pytest

from tests.patience import calibrate

calibrate()
pytest_plugins = ["tests.left_out"]

# A shell ignores these signals for programs in the background. Tests send them to
# themselves and to processes that they start.
for number, handler in {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: signal.SIG_DFL,
}.items():
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

# Hypothesis would fail a test that is slow, and a busy machine makes every test slow.
# The same code gets the same examples, so that a run that passed passes again.
hypothesis.settings.register_profile(
    "patient",
    parent=hypothesis.settings(),
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("patient")


def forget_devices() -> dict[str, str]:
    """Returns the environment for a process that chooses its devices itself."""
    flags = os.environ["XLA_FLAGS"].split()
    kept = " ".join(flag for flag in flags if DEVICE_COUNT_FLAG not in flag)
    return {**os.environ, "XLA_FLAGS": kept}


# Workers hold millions of objects that live as long as they do. To look for garbage as
# often as Python does takes a sixth of the time of the tests.
gc.set_threshold(100_000, 50, 100)

TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"
ContextFactory = Callable[[], AbstractContextManager[None]]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leaves what is there after the imports out of all looks for garbage."""
    if session.config.getoption("loadgroup", False):
        # Each worker would start servers of its own (pytest-xdist#1386).
        grouped = [i for i in session.items if i.get_closest_marker("xdist_group")]
        assert all("@" in item.nodeid for item in grouped)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    """Gives SIGTERM its meaning back, after a program that would have ended."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@pytest.fixture
def optimized() -> Iterator[None]:
    """Compiles programs with XLA's optimizations: for proofs of equal bits.

    Processes that the test starts optimize too. All keep the flags of
    `QUICK_COMPILATION`, because XLA has read them here, and processes whose bits are
    compared need the same flags. Without the fixture, programs are compiled in a third
    of the time.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OPTIMIZE_LESS.upper(), "0")
        jax.config.update(OPTIMIZE_LESS, False)
        yield
    jax.config.update(OPTIMIZE_LESS, os.environ[OPTIMIZE_LESS.upper()] != "0")


@pytest.fixture
def no_retrace() -> ContextFactory:
    """Returns a context in which tracing any function fails the test.

    Warm the program up first, so that what is caught is a second trace::

        loop(batch)
        with no_retrace():
            loop(batch)
    """

    @contextmanager
    def context() -> Iterator[None]:
        traced: list[str] = []

        def listener(event: str, _: float, **details: object) -> None:
            if event == TRACE_EVENT:
                traced.append(str(details.get("fun_name", "a function")))

        jax.monitoring.register_event_duration_secs_listener(listener)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(listener)
        assert not traced, f"Traced again after warm-up: {', '.join(traced)}."

    return context


@pytest.fixture
def no_transfer() -> ContextFactory:
    """Returns a context in which an implicit transfer to or from a device fails."""

    def context() -> AbstractContextManager[None]:
        return jax.transfer_guard("disallow")

    return context


@pytest.fixture
def keras() -> Iterator[Any]:
    """Returns Keras, on JAX. Its layers rely on the promotion of ranks."""
    module = pytest.importorskip("keras")
    with jax.numpy_rank_promotion("allow"):
        yield module
        module.utils.clear_session(free_memory=False)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Returns the folder of shared datasets, or skips the test if there is none."""
    default = REPOSITORY.parent / "shared" / "data"
    folder = Path(os.environ.get("ARMILLARY_SHARED_DATA", default))
    if not folder.is_dir():
        pytest.skip(
            "The shared datasets are not here: `../shared/data` beside the repository "
            "is missing and `ARMILLARY_SHARED_DATA` names no folder."
        )
    return folder
