"""The programs of several processes that keep snapshots of one state in memory."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax

import armillary
from armillary.checkpoint.memory import _exchange
from tests.multiprocess.joint_saves import digest, make_state, make_values


class Run:
    """A state, and the manager that keeps it in memory."""

    def __init__(self, run_dir: str, memory: str, seed: int) -> None:
        self.strategy = armillary.ShardedStrategy()
        self.state = make_state(self.strategy, make_values(seed))
        Path(memory).mkdir(parents=True, exist_ok=True)
        self.manager = armillary.CheckpointManager(
            armillary.Checkpoint(state=self.state),
            run_dir,
            memory_interval_seconds=60,
            memory_directory=memory,
        )
        assert self.manager.memory is not None
        self.memory = self.manager.memory

    def keep(self, seed: int) -> None:
        """Keeps other values in memory, and waits until they are whole."""
        vars(self.state).update(vars(make_state(self.strategy, make_values(seed))))
        self.manager.save_to_memory()
        self.memory.sync()


def own_memory(memory: str, *, is_shared: bool) -> str:
    """Returns a folder for all processes, or for this one, as on its own machine."""
    return memory if is_shared else f"{memory}/machine_{jax.process_index()}"


def keeps(run_dir: str, memory: str, *, is_shared: bool) -> dict[str, Any]:
    """Keeps two snapshots, of which the second replaces the first."""
    armillary.ShardedStrategy()
    folder = own_memory(memory, is_shared=is_shared)
    run = Run(run_dir, folder, seed=1)
    run.keep(1)
    run.keep(2)
    index = jax.process_index()
    files = sorted(Path(folder).glob(f"armillary-*/process_{index}/*/*.bin"))
    sizes = {file.name: file.stat().st_size for file in files}
    return {"kept": digest(run.state), "sizes": sizes}


def restores(run_dir: str, memory: str, *, is_shared: bool) -> dict[str, Any]:
    """Restores into other values, and counts the bytes from other processes."""
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
    return {"name": name, "restored": digest(run.state), "received": received}


def is_killed(run_dir: str, memory: str, *, is_shared: bool) -> None:
    """Keeps one snapshot; then one process ends while all write the next one."""
    armillary.ShardedStrategy()
    run = Run(run_dir, own_memory(memory, is_shared=is_shared), seed=1)
    run.keep(1)
    if jax.process_index() == 1:

        def end(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        _exchange.Connection.copy = end
    vars(run.state).update(vars(make_state(run.strategy, make_values(2))))
    run.manager.save_to_memory()
    run.memory.sync()  # The others end, because process 1 does not answer.


def main() -> None:
    scenario, result, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    found = globals()[scenario](**options)
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
