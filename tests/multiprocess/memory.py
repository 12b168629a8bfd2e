"""The programs of several processes that keep snapshots of one state in memory."""

import errno
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import armillary
from armillary._launcher import SKIPPED
from armillary.checkpoint.memory import _exchange
from tests.multiprocess.joint_saves import digest, make_state, make_values
from tests.multiprocess.scenarios import run_scenario

CHIEF_SIZE = 1 << 20
"""The elements of an array that lies in process 0 alone."""


class Run:
    """A state, and the manager that keeps it in memory."""

    def __init__(self, run_dir: str, memory: str, seed: int) -> None:
        self.strategy = armillary.ShardedStrategy()
        self.state = self._make_state(seed)
        Path(memory).mkdir(parents=True, exist_ok=True)
        self.manager = armillary.CheckpointManager(
            armillary.Checkpoint(state=self.state),
            run_dir,
            memory_interval_seconds=60,
            memory_directory=memory,
        )
        assert self.manager.memory is not None
        self.memory = self.manager.memory

    def _make_state(self, seed: int) -> SimpleNamespace:
        """Returns a state, of which one array lies in process 0 alone."""
        state = make_state(self.strategy, make_values(seed))
        mesh = jax.sharding.Mesh(jax.devices()[:2], "x")
        own = NamedSharding(mesh, PartitionSpec("x"))
        value = np.full((CHIEF_SIZE,), seed, np.float32)
        state.chief = jax.make_array_from_callback(
            value.shape, own, lambda at: value[at], dtype=value.dtype
        )
        return state

    def digest(self) -> dict[str, str]:
        """Returns digests of all arrays that lie in all processes."""
        state = SimpleNamespace(**vars(self.state))
        chief = state.__dict__.pop("chief")
        found = digest(state)
        for shard in chief.addressable_shards:
            found["chief"] = str(np.unique(shard.data))
        return found

    def keep(self, seed: int) -> None:
        """Keeps other values in memory, and waits until they are whole."""
        vars(self.state).update(vars(self._make_state(seed)))
        self.manager.save_to_memory()
        self.memory.sync()


def own_memory(memory: str, *, is_shared: bool) -> str:
    """Returns a folder for all processes, or for this one, as on its own machine."""
    return memory if is_shared else f"{memory}/machine_{jax.process_index()}"


def keeps(
    run_dir: str, memory: str, *, is_shared: bool, seed: int = 2
) -> dict[str, Any]:
    """Keeps two snapshots, of which the second replaces the first.

    The manager is closed after each of them.
    """
    armillary.ShardedStrategy()
    folder = own_memory(memory, is_shared=is_shared)
    run = Run(run_dir, folder, seed=1)
    run.keep(1)
    run.manager.close()
    run.keep(seed)
    run.manager.close()
    threads = [thread.name for thread in threading.enumerate()]
    index = jax.process_index()
    files = sorted(Path(folder).glob(f"armillary-*/process_{index}/*/*.bin"))
    sizes = {file.name: file.stat().st_size for file in files}
    return {"kept": run.digest(), "sizes": sizes, "threads": threads}


def restores(
    run_dir: str, memory: str, *, is_shared: bool, skipped: str = ""
) -> dict[str, Any]:
    """Restores into other values, and counts the bytes from other processes."""
    os.environ[SKIPPED] = skipped
    received = 0
    read = _exchange.Connection.read

    def count(self: Any, place: Any, offset: int, size: int) -> bytes:
        nonlocal received
        content = read(self, place, offset, size)
        received += len(content) if size >= 0 else 0
        return content

    _exchange.Connection.read = count
    armillary.ShardedStrategy()
    run = Run(run_dir, own_memory(memory, is_shared=is_shared), seed=9)
    path = run.manager.restore_or_initialize()
    name = None if path is None else Path(path).name
    return {"name": name, "restored": run.digest(), "received": received}


def is_full(run_dir: str, memory: str, *, is_shared: bool) -> None:
    """Keeps one snapshot; then one process has no room for the copy of another one."""
    armillary.ShardedStrategy()
    run = Run(run_dir, own_memory(memory, is_shared=is_shared), seed=1)
    run.keep(1)
    if jax.process_index() == 1:

        def be_full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        _exchange.reserved = be_full
    run.keep(2)


def is_killed(run_dir: str, memory: str, *, is_shared: bool) -> None:
    """Keeps one snapshot; then one process ends while all write the next one."""
    armillary.ShardedStrategy()
    run = Run(run_dir, own_memory(memory, is_shared=is_shared), seed=1)
    run.keep(1)
    if jax.process_index() == 1:

        def end(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        _exchange.Connection.copy = end
    run.keep(2)  # The others end, because process 1 does not answer.


if __name__ == "__main__":
    run_scenario(globals())
