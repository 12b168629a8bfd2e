"""What every test shares: eight CPU devices, strict JAX settings and a few fixtures.

The environment is set before JAX is imported, because JAX reads it once. Processes that
a test starts inherit it.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"

if DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} {DEVICE_COUNT_FLAG}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# A failing test shows where in the library it fails.
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
# One cache for all workers and all runs: most of the suite's time is compilation.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".pytest_cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest

TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"
ContextFactory = Callable[[], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    """Gives SIGTERM its meaning back, after a program that would have ended."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


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
        module.utils.clear_session()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Returns the folder of shared data sets, or skips the test if there is none."""
    default = REPOSITORY.parent / "shared" / "data"
    folder = Path(os.environ.get("ARMILLARY_SHARED_DATA", default))
    if not folder.is_dir():
        pytest.skip(
            "The shared data sets are not here: `../shared/data` beside the repository "
            "is missing and `ARMILLARY_SHARED_DATA` names no folder."
        )
    return folder
