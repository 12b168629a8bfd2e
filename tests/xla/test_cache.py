"""Tests of the compilation cache, in the fresh processes that it is for."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from armillary.xla import use_compilation_cache
from tests.environment import CAN_CACHE, OPTIMIZE_LESS, forget_devices
from tests.patience import patience

TESTS = Path(__file__).resolve().parents[1]
SETTINGS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
PROGRAM = """
import collections, hashlib, json, sys
import jax
import armillary, armillary.xla
directory, num_devices = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", num_devices)
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
if directory:
    assert armillary.xla.use_compilation_cache(directory) == directory
import numpy as np, optax, problems
from flax import nnx

strategy = armillary.MirroredStrategy()
with strategy.scope():
    model = problems.MLP(nnx.Rngs(0))
trainer = problems.Classifier(strategy, model, optax.adam(1e-2))
controller = armillary.Controller(
    trainer=trainer, global_step=trainer.optimizer.step, steps_per_loop=5,
    strategy=strategy,
)
controller.train(10)
arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
content = b"".join(np.asarray(array).tobytes() for array in [*arrays, trainer.losses])
name = "/jax/compilation_cache/"
print(json.dumps({
    "replicas": strategy.num_replicas_in_sync,
    "requests": events[name + "compile_requests_use_cache"],
    "hits": events[name + "cache_hits"],
    "stored": events[name + "cache_misses"],
    "results": hashlib.sha256(content).hexdigest(),
}))
"""


def run_program(directory: Path | str, num_devices: int) -> tuple[dict[str, Any], str]:
    """Trains in a fresh process; returns what it counted, and its messages."""
    inherited = {
        name: value
        for name, value in forget_devices().items()
        if not name.startswith("JAX_") or name == OPTIMIZE_LESS.upper()
    }
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory), str(num_devices)],
        check=False,
        capture_output=True,
        text=True,
        timeout=patience(240),
        env={
            **inherited,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}",
        },
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1]), child.stderr


def test_a_second_process_trains_without_compiling(tmp_path: Path) -> None:
    without, _ = run_program("", 4)
    first, _ = run_program(tmp_path, 4)
    second, messages = run_program(tmp_path, 4)

    assert first["replicas"] == 4
    # Without a cache, nothing is loaded or stored, and the counters are alive.
    assert (without["hits"], without["stored"]) == (0, 0)
    assert first["stored"] + first["hits"] == first["requests"] > 10
    # Two threads that compile the same small program store it once, and count it twice.
    assert 10 < len(list(tmp_path.iterdir())) <= first["stored"]
    assert second["requests"] == second["hits"] > 10
    assert second["stored"] == 0
    assert without["results"] == first["results"] == second["results"]
    # XLA says so if it takes this machine for another one than it compiled for. Older
    # releases do on every machine.
    if CAN_CACHE:
        assert "machine" not in messages.lower()


@pytest.fixture
def restore_settings() -> Iterator[None]:
    """Puts the cache of this process back after the test."""
    before = {name: jax.config.values[name] for name in SETTINGS}
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.slow
@pytest.mark.usefixtures("restore_settings")
def test_a_cache_in_use_is_replaced(tmp_path: Path) -> None:
    for name in ("first", "second"):
        path = use_compilation_cache(tmp_path / name)
        assert path == str(tmp_path / name)
        assert list(Path(path).iterdir()) == []
        # A new function, so that JAX does not have it in memory.
        jax.jit(lambda x: x + 1)(jax.numpy.zeros(3)).block_until_ready()
        assert len(list(Path(path).iterdir())) >= 1


@pytest.mark.usefixtures("restore_settings")
def test_a_relative_directory_is_made_absolute_and_a_remote_one_left_to_jax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert use_compilation_cache("cache") == str(tmp_path / "cache")
    assert use_compilation_cache("gs://bucket/cache") == "gs://bucket/cache"
    assert jax.config.values["jax_compilation_cache_dir"] == "gs://bucket/cache"


@pytest.mark.parametrize(
    ("directory", "kind"),
    [(b"cache", TypeError), ("", ValueError), (__file__, FileExistsError)],
)
def test_an_unusable_directory_is_refused_and_changes_nothing(
    directory: Any, kind: type[Exception]
) -> None:
    before = {name: jax.config.values[name] for name in SETTINGS}
    with pytest.raises(kind):
        use_compilation_cache(directory)
    assert {name: jax.config.values[name] for name in SETTINGS} == before
