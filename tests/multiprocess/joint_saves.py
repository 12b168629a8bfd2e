"""The programs of several processes that write and read one checkpoint together."""

import hashlib
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import armillary
from armillary.checkpoint import _checksums, _commit
from armillary.errors import ArmillaryError
from tests.multiprocess.scenarios import run_scenario

ROWS = 768


def make_values(seed: int) -> dict[str, np.ndarray]:
    """Returns the values of a state, by name."""
    rng = np.random.default_rng(seed)
    return {
        "divided": rng.normal(size=(ROWS, 2048)).astype(np.float32),
        "crossed": rng.normal(size=(64, ROWS)).astype(np.float32),
        "whole": rng.normal(size=(1024, 1024)).astype(np.float32),
        "small": rng.normal(size=7).astype(np.float32),
        "nibbles": rng.integers(0, 15, (48, 8)).astype(np.uint8),
        "empty": np.zeros((0, 3), np.float32),
    }


def make_state(strategy: Any, values: dict[str, np.ndarray]) -> SimpleNamespace:
    """Returns an object with the values on all devices, and some that each one has."""
    specs = {
        "divided": PartitionSpec("fsdp"),
        "crossed": PartitionSpec(None, "fsdp"),
        "nibbles": PartitionSpec("fsdp"),
    }

    def place(name: str, value: Any) -> jax.Array:
        sharding = NamedSharding(strategy.mesh, specs.get(name, PartitionSpec()))
        return jax.make_array_from_callback(value.shape, sharding, lambda at: value[at])

    arrays = {name: place(name, value) for name, value in values.items()}
    arrays["nibbles"] = arrays["nibbles"].astype(jnp.uint4)
    bits = place("key", np.asarray(jax.random.key_data(jax.random.key(3))))
    local = jnp.full(5, values["small"][0])
    return SimpleNamespace(**arrays, key=jax.random.wrap_key_data(bits), local=local)


def digest(state: SimpleNamespace) -> dict[str, str]:
    """Returns a digest of each array, with all processes."""
    found: dict[str, str] = {}
    for name, value in sorted(vars(state).items()):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        if not value.is_fully_addressable:
            value = multihost_utils.process_allgather(value, tiled=True)
        content = np.asarray(value).astype(np.float64).tobytes()
        found[name] = hashlib.sha256(content).hexdigest()[:12]
    return found


class Run:
    """A state, and the manager that saves it."""

    def __init__(self, run_dir: str, seed: int) -> None:
        self.strategy = armillary.ShardedStrategy()
        self.state = make_state(self.strategy, make_values(seed))
        self.directory = Path(run_dir)
        self.manager = armillary.CheckpointManager(
            armillary.Checkpoint(state=self.state), run_dir
        )

    def save(self, number: int) -> str | None:
        """Saves, and returns the error, if any."""
        try:
            self.manager.save(number)
            self.manager.sync()
        except ArmillaryError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def restore(self) -> str | None:
        """Restores the newest checkpoint, and returns its name."""
        path = self.manager.restore_or_initialize()
        return None if path is None else Path(path).name

    def change(self, seed: int) -> None:
        vars(self.state).update(
            vars(make_state(self.strategy, make_values(seed))),
        )


def saves(run_dir: str) -> dict[str, Any]:
    """Saves twice, and changes the arrays while they are written."""
    run = Run(run_dir, seed=1)
    saved = digest(run.state)
    assert run.save(1) is None
    first = run.manager.save(2)
    # The memory of the old arrays is used again at once.
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    for name in ("divided", "crossed", "whole"):
        setattr(run.state, name, double(getattr(run.state, name)))
    run.manager.sync()

    assert first is not None
    own = Path(first, "arrays", f"ocdbt.process_{jax.process_index()}", "d")
    num_bytes = sum(file.stat().st_size for file in own.iterdir())
    return {"saved": saved, "bytes": num_bytes}


def restores(run_dir: str) -> dict[str, Any]:
    """Restores, and counts the bytes that this process verifies."""
    run = Run(run_dir, seed=9)
    verified: list[int] = []
    measure = _checksums.measure

    def measure_and_count(*arguments: Any) -> Any:
        found = measure(*arguments)
        verified.append(found[0])
        return found

    _checksums.measure = measure_and_count
    name = run.restore()
    return {
        "name": name,
        "restored": digest(run.state),
        "verified": sum(verified),
        "spec": list(run.state.divided.sharding.spec),
        "error": restore_damaged(run),
    }


def restore_damaged(run: Run) -> str:
    """Returns the error after a file of the last process of the save has changed."""
    folder = run.directory / "checkpoint_2" / "arrays"
    if jax.process_index() == 0:
        files = [*(folder / "ocdbt.process_3" / "d").iterdir()]
        file = max(files, key=lambda file: file.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    multihost_utils.sync_global_devices("damaged")
    run.change(seed=8)
    assert run.restore() == "checkpoint_1"
    try:
        run.manager.restore(run.directory / "checkpoint_2")
    except ArmillaryError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def fails(run_dir: str) -> dict[str, Any]:
    """Saves while one process cannot write, copy or see the folder of the others."""
    run = Run(run_dir, seed=1)
    index = jax.process_index()
    found: dict[str, Any] = {"first": run.save(1)}

    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if index == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    found["write"] = run.save(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    def run_out_of_memory(*arguments: Any) -> None:
        raise MemoryError("no memory for a copy")

    found["copy"] = with_patch(
        run, "copy_arrays", run_out_of_memory if index == 1 else None
    )

    def copy_elsewhere(folder: Any, arrays: Any) -> Callable[[], None]:
        # Another file system that is mounted at the same place.
        other = epath.Path(run.directory / "elsewhere" / folder.name)
        wait = copy(other, arrays)

        def wait_and_pretend() -> None:
            wait()
            _commit.find_own_files = lambda _: find(other)
            _commit.measure_all = lambda _, files: measure_all(other, files)

        return wait_and_pretend

    copy, find = _commit.copy_arrays, _commit.find_own_files
    measure_all = _commit.measure_all
    found["elsewhere"] = with_patch(
        run, "copy_arrays", copy_elsewhere if index == 1 else None
    )
    _commit.find_own_files, _commit.measure_all = find, measure_all

    found["after"] = run.save(3)
    found["names"] = sorted(path.name for path in run.directory.glob("checkpoint*"))
    run.change(seed=8)
    found["restored"] = [run.restore(), digest(run.state)]
    return found


def with_patch(run: Run, name: str, replacement: Any) -> str | None:
    """Returns the error of a save with another function of the library."""
    original = getattr(_commit, name)
    if replacement is not None:
        setattr(_commit, name, replacement)
    error = run.save(2)
    setattr(_commit, name, original)
    return error


def dies(run_dir: str, at: str) -> dict[str, Any]:
    """Kills one process in a save, at some point of it."""
    run = Run(run_dir, seed=1)
    assert run.save(1) is None
    run.change(seed=2)

    def kill(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    victim = 0 if at == "commit" else 1
    if jax.process_index() == victim:
        copy, send = _commit.copy_arrays, run.manager._writer._peers.send_part
        if at == "write":
            _commit.copy_arrays = lambda *args: (copy(*args), kill)[1]
        elif at == "before the report":
            run.manager._writer._peers.send_part = kill
        elif at == "after the report":
            run.manager._writer._peers.send_part = lambda *args: (send(*args), kill())
        else:
            _commit.write_checksums = kill
    run.save(2)
    return {"name": run.restore()}


def resumes(run_dir: str) -> dict[str, Any]:
    """Restores after a fault, saves once more, and restores that."""
    run = Run(run_dir, seed=9)
    found = {"name": run.restore(), "restored": digest(run.state)}
    error = run.save(7)
    found["left"] = sorted(path.name for path in run.directory.glob("*tmp*"))
    return found | {"error": error, "again": run.restore()}


if __name__ == "__main__":
    run_scenario(globals())
