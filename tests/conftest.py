"""Shared fixtures of all tests, and settings of JAX, Hypothesis and pytest.

`environment.py` is imported first, because JAX reads the environment only once.
"""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.environment import OPTIMIZE_LESS, REPOSITORY

# isort: split

import hypothesis
import jax
import pytest

from tests.patience import calibrate

calibrate()
pytest_plugins = ["tests.left_out", "tests.memory"]

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
