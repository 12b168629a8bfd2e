"""Compares saves and restores of several processes with plain Orbax in the same job.

    python -m benchmarks.joint_saves --processes 4 --megabytes 600

A job holds arrays that are divided between all devices. In turns, Armillary and Orbax
save them in the background and restore them. Both write without compression. Armillary
also computes checksums, waits until all files are on the disk, and verifies the
checksums before a restore. The third row is a snapshot in memory (`/dev/shm`), with a
copy at another process. Memory is the largest growth of a process, on Linux.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.processes import run_job
from benchmarks.report import add_measurement, make_parser

_DEADLINE_SECONDS = 900
_NUM_ARRAYS = 12
_COLUMNS = 1024
_COLUMN_NAMES = {
    "blocked": "save: training waits",
    "saved": "save: until complete",
    "save_bytes": "save: memory",
    "restored": "restore",
    "restore_bytes": "restore: memory",
    "read_bytes": "restore: read",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = make_parser(
        "joint_saves", "Compares saves of several processes with plain Orbax."
    )
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--devices", type=int, default=2, help="of each process")
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker is not None:
        work(given.worker, given.megabytes, given.rounds)
        return

    title = f"{given.megabytes} MB over {given.devices} devices in each process"
    table = Table(title=title, pad_edge=False)
    for name in ("processes", "", *_COLUMN_NAMES.values()):
        table.add_column(name, justify="right")
    measurement: dict[str, Any] = {}
    for count in given.processes:
        found = measure(count, given)
        measurement[str(count)] = found
        for name in found:
            cells = [_format(key, found[name][key]) for key in _COLUMN_NAMES]
            table.add_row(str(count), name, *cells)
    Console().print(table)
    add_measurement(given.json, "joint_saves", measurement)


def _format(key: str, value: float) -> str:
    return f"{value / 1e6:.0f} MB" if key.endswith("bytes") else f"{value:.2f} s"


def measure(count: int, given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Returns the medians of both; of all processes, the slowest and largest one."""
    with tempfile.TemporaryDirectory(
        prefix="armillary-bench-", dir=given.directory
    ) as folder:
        words = ["--worker", folder]
        words += ["--megabytes", str(given.megabytes), "--rounds", str(given.rounds)]
        run_job(
            "benchmarks.joint_saves",
            words,
            processes=count,
            devices=given.devices,
            timeout_seconds=_DEADLINE_SECONDS,
        )
        files = Path(folder).glob("found_*.json")
        return summarize([json.loads(file.read_text()) for file in files])


def summarize(processes: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the median over rounds of the worst process, by name and measure."""
    found: dict[str, dict[str, float]] = {}
    for name in processes[0]:
        found[name] = {}
        for key in _COLUMN_NAMES:
            rounds = [process[name][key] for process in processes]
            worst = [max(values) for values in zip(*rounds, strict=True)]
            found[name][key] = statistics.median(worst)
    return found


def work(folder: Path, megabytes: int, rounds: int) -> None:
    """Saves and restores in turns, in each process of the job.

    Args:
        folder: A directory that all processes see.
        megabytes: The size of the state.
        rounds: The number of turns of each.
    """
    # Armillary joins the processes, so it comes before JAX's devices are used.
    import armillary

    strategy = armillary.ShardedStrategy()
    import jax

    state = make_state(strategy.mesh, megabytes)
    meet = strategy.placement.peers.gather
    programs: dict[str, Any] = {
        "armillary": ArmillaryProgram(folder / "armillary", state),
        "orbax": OrbaxProgram(folder / "orbax", state),
        "memory": MemoryProgram(folder / "memory", state),
    }
    found: dict[str, dict[str, list[float]]] = {
        name: {key: [] for key in _COLUMN_NAMES} for name in programs
    }
    for index in range(-1, rounds):  # The first round compiles programs.
        for name, program in programs.items():
            meet("a turn", "")
            values = measure_turn(program, index + 1)
            if index >= 0:
                for key, value in values.items():
                    found[name][key].append(value)
            meet("the end of a turn", "")
            program.end_turn()
            meet("the next turn", "")
    programs["memory"].end()
    file = folder / f"found_{jax.process_index()}.json"
    file.write_text(json.dumps(found))


def measure_turn(program: Any, number: int) -> dict[str, float]:
    """Returns the seconds and bytes of one save and one restore."""
    values: dict[str, float] = {}
    grown = _watch_memory()
    start = time.perf_counter()
    program.save(number)
    values["blocked"] = time.perf_counter() - start
    program.wait()
    values["saved"] = time.perf_counter() - start
    values["save_bytes"] = grown()

    grown = _watch_memory()
    already_read = _count_read()
    start = time.perf_counter()
    program.restore(number)
    values["restored"] = time.perf_counter() - start
    values["restore_bytes"] = grown()
    values["read_bytes"] = _count_read() - already_read
    return values


def make_state(mesh: Any, megabytes: int) -> SimpleNamespace:
    """Returns arrays of random numbers, each divided between all devices."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    rows = megabytes * 10**6 // (4 * _COLUMNS * _NUM_ARRAYS)
    rows -= rows % mesh.size
    make = jax.jit(
        lambda key: jax.random.normal(key, (rows, _COLUMNS)), out_shardings=sharding
    )
    arrays = [make(jax.random.key(index)) for index in range(_NUM_ARRAYS)]
    return SimpleNamespace(arrays=jax.block_until_ready(arrays))


class ArmillaryProgram:
    """Saves and restores with a `CheckpointManager`."""

    def __init__(self, directory: Path, state: SimpleNamespace) -> None:
        import armillary

        checkpoint = armillary.Checkpoint(state=state)
        self._manager = armillary.CheckpointManager(checkpoint, directory)

    def save(self, number: int) -> None:
        self._manager.save(number)

    def wait(self) -> None:
        self._manager.sync()

    def restore(self, number: int) -> None:
        del number
        assert self._manager.restore_or_initialize() is not None

    def end_turn(self) -> None:
        _remove(self._manager.directory)


class MemoryProgram:
    """Takes snapshots in memory, and restores them."""

    def __init__(self, directory: Path, state: SimpleNamespace) -> None:
        import armillary

        self._manager = armillary.CheckpointManager(
            armillary.Checkpoint(state=state), directory, memory_interval_seconds=3600
        )
        assert self._manager.memory is not None
        self._memory = self._manager.memory

    def save(self, number: int) -> None:
        del number
        self._manager.save_to_memory()

    def wait(self) -> None:
        self._memory.sync()

    def restore(self, number: int) -> None:
        del number
        assert self._manager.restore_or_initialize() is not None

    def end_turn(self) -> None:
        """Keeps the snapshot, which the next one replaces."""

    def end(self) -> None:
        self._memory.drop()


class OrbaxProgram:
    """Saves and restores with Orbax' `AsyncCheckpointer`, in all processes."""

    def __init__(self, directory: Path, state: SimpleNamespace) -> None:
        import orbax.checkpoint as ocp

        self._directory = directory
        self._state = state
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        self._checkpointer = ocp.AsyncCheckpointer(handler)

    def save(self, number: int) -> None:
        import orbax.checkpoint as ocp

        arrays = dict(enumerate(self._state.arrays))
        self._checkpointer.save(
            self._directory / str(number), args=ocp.args.PyTreeSave(arrays)
        )

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()

    def restore(self, number: int) -> None:
        import jax
        import orbax.checkpoint as ocp

        arrays = dict(enumerate(self._state.arrays))
        restore_args = ocp.checkpoint_utils.construct_restore_args(arrays)
        restored = self._checkpointer.restore(
            self._directory / str(number),
            args=ocp.args.PyTreeRestore(item=arrays, restore_args=restore_args),
        )
        self._state.arrays = [restored[index] for index in arrays]
        jax.block_until_ready(self._state.arrays)

    def end_turn(self) -> None:
        _remove(self._directory)


def _remove(directory: str | Path) -> None:
    """Removes the files of a turn, in the first process."""
    import jax

    if jax.process_index() == 0:
        shutil.rmtree(directory)


def _watch_memory() -> Callable[[], float]:
    """Returns a function that says how many bytes the process has grown since."""
    Path("/proc/self/clear_refs").write_text("5")  # The peak counts from now.
    before = _read_status("VmRSS")
    return lambda: max(0.0, _read_status("VmHWM") - before)


def _read_status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(name)]
    return 1024.0 * int(line.split()[1])


def _count_read() -> float:
    """Returns the bytes that the process has read from files so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("rchar")]
    return float(line.split()[1])


if __name__ == "__main__":
    main()
