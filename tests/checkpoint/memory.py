"""A state with values of many kinds, and the manager that keeps it in memory."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from armillary.checkpoint import Checkpoint, CheckpointManager
from tests.problems import Holder


def make_state(seed: int) -> Holder:
    rng = np.random.default_rng(seed)
    return Holder(
        weights=jnp.asarray(rng.normal(size=(5, 3)), jnp.bfloat16),
        scalar=jnp.asarray(seed),
        key=jax.random.key(seed),
        nibbles=jnp.asarray(rng.integers(0, 15, 7)).astype(jnp.uint4),
        tiny=jnp.asarray([seed, 0.5], "float8_e4m3"),
        empty=jnp.zeros((0, 2)),
        step=jnp.asarray(10 * seed),
    )


def read(state: Holder) -> dict[str, list[float]]:
    values = dict(vars(state))
    values["key"] = jax.random.key_data(values["key"])
    return {name: np.asarray(each).tolist() for name, each in values.items()}


def open_manager(state: Holder, tmp_path: Path, **options) -> CheckpointManager:
    return CheckpointManager(
        Checkpoint(state=state),
        tmp_path / "run",
        step_counter=lambda: int(state.step),
        memory_interval_seconds=options.pop("memory_interval_seconds", 60),
        memory_directory=tmp_path / "memory",
        **options,
    )


def keep(manager: CheckpointManager) -> None:
    """Keeps the values in memory, and waits until they are complete."""
    assert manager.memory is not None
    manager.save_to_memory()
    manager.memory.sync()


def restore(tmp_path: Path, **options) -> tuple[str | None, Holder]:
    """Restores into another state, as the next program does."""
    state = make_state(9)
    path = open_manager(state, tmp_path, **options).restore_or_initialize()
    return path, state


def find_files(memory: Path) -> list[Path]:
    return sorted(path for path in memory.rglob("*") if path.is_file())


def find_snapshots(memory: Path) -> set[str]:
    return {path.name for path in memory.glob("armillary-*/process_*/*")}
