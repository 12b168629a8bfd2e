"""Compares rows per second of packed text, in jobs of several processes.

    python -m benchmarks.rows_of_jobs --processes 1 4

All contestants read the same rows: documents of random lengths, packed by
`armillary.data.pack`. Each process reads the rows of its own device, and a batch is
complete when it is on all devices:

- `armillary`: `from_random_access`, in one order for all processes;
- `mixture`: two halves of the documents, mixed by `armillary.data.mix`;
- `grain`: a `MapDataset` whose rows are sliced for each process, with
  `jax.make_array_from_process_local_data`;
- `grain, no thread`: the same, read in the thread of the program, as Grain recommends
  for data in memory;
- `torch`: a `DataLoader` with a `DistributedSampler`, if PyTorch is installed, read in
  the thread of the program.

They take turns, and the ratio compares them with `grain` in the same round. No library
gets worker processes, because the work for a row is compared. Armillary and `grain`
read two batches ahead in one thread. With the default of Grain, 16 threads would read
500 batches during the turns of the others. After each turn, the contestant gets the
time to fill its two batches, which the next turn would otherwise pay for. Armillary and
PyTorch ask for several packed rows at once (`__getitems__`), and Grain for one.
"""

import argparse
import functools
import importlib
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.processes import run_job
from benchmarks.ratios import pair_ratios
from benchmarks.report import add_measurement, make_parser

_DEADLINE_SECONDS = 900
_REFERENCE = "grain"
_MEAN_LENGTH = 300
_NUM_AHEAD = 2
"""Batches that a thread reads ahead: the default of `armillary.data.InputOptions`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = make_parser("rows_of_jobs", "Compares rows per second of packed text.")
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--row-length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes")
    parser.add_argument("--batches", type=int, default=50, help="in a turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker is not None:
        work(given)
        return

    for count in given.processes:
        if given.batch_size % count:
            parser.error(
                f"--batch-size is {given.batch_size}, which {count} processes cannot "
                f"share equally. Use a multiple of {count}."
            )

    title = f"Rows of {given.row_length} tokens, {given.batch_size} in a batch"
    table = Table(title=title, pad_edge=False)
    for name in ("processes", "source", "rows/s", "beside Grain (lowest to highest)"):
        table.add_column(name, justify="right")
    measurement: dict[str, Any] = {}
    for count in given.processes:
        found = measurement[str(count)] = measure(count, given)
        for name, values in found.items():
            ratio = (
                f"{values['ratio']:.2f} ({values['low']:.2f} to {values['high']:.2f})"
            )
            rate = f"{values['rows_per_second']:,.0f}"
            table.add_row(str(count), name, rate, ratio)
    Console().print(table)
    add_measurement(given.json, "rows_of_jobs", measurement)


def measure(count: int, given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Returns the rows per second of each contestant in a job of `count` processes."""
    with tempfile.TemporaryDirectory(prefix="armillary-bench-") as folder:
        names = ("documents", "row_length", "batch_size", "batches", "rounds")
        words = ["--worker", folder]
        for name in names:
            words += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
        run_job(
            "benchmarks.rows_of_jobs",
            words,
            processes=count,
            devices=1,
            timeout_seconds=_DEADLINE_SECONDS,
        )
        files = sorted(Path(folder).glob("found_*.json"))
        return summarize(
            [json.loads(file.read_text()) for file in files],
            given.batches * given.batch_size,
        )


def summarize(
    processes: list[dict[str, list[float]]], num_rows: int
) -> dict[str, dict[str, float]]:
    """Returns the figures of each contestant; the slowest process of a turn counts.

    Args:
        processes: For each process, the seconds of the turns of each contestant.
        num_rows: The rows of a turn, in all processes together.
    """
    seconds = {
        name: [
            max(turn) for turn in zip(*(own[name] for own in processes), strict=True)
        ]
        for name in processes[0]
    }
    found: dict[str, dict[str, float]] = {}
    for name, turns in seconds.items():
        ratio = pair_ratios(seconds[_REFERENCE], turns)
        found[name] = {
            "rows_per_second": num_rows / statistics.median(turns),
            "ratio": ratio.median,
            "low": ratio.low,
            "high": ratio.high,
        }
    return found


def work(given: argparse.Namespace) -> None:
    """Reads batches in turns, in each process of the job."""
    # Armillary joins the processes, so it comes before JAX's devices are used.
    import armillary

    strategy = armillary.ShardedStrategy()
    import jax

    meet = strategy.placement.peers.gather
    makers: dict[str, tuple[str, Callable[..., Iterator[Any]]]] = {
        "armillary": ("armillary", _open_armillary),
        "mixture": ("armillary", _open_mixture),
        "grain": ("grain", _open_grain),
        "grain, no thread": ("grain", functools.partial(_open_grain, num_threads=0)),
        "torch": ("torch", _open_torch),
    }
    documents = _make_documents(given.documents)
    streams = {
        name: make(strategy, documents, given)
        for name, (library, make) in makers.items()
        if importlib.util.find_spec(library)
    }
    found: dict[str, list[float]] = {name: [] for name in streams}
    for index in range(-1, given.rounds):  # The first round warms up.
        for name, stream in streams.items():
            meet("a turn", "")
            start = time.perf_counter()
            for _ in range(given.batches):
                jax.block_until_ready(next(stream))
            seconds = time.perf_counter() - start
            if index >= 0:
                found[name].append(seconds)
            # One batch more, because other processes may use the same cores.
            time.sleep((_NUM_AHEAD + 1) * seconds / given.batches)
    file = given.worker / f"found_{jax.process_index()}.json"
    file.write_text(json.dumps(found))


def _make_documents(count: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    sizes = random.geometric(1 / _MEAN_LENGTH, count)
    return [random.integers(1, 256, size).astype(np.int32) for size in sizes]


def _pack(documents: list[np.ndarray], given: argparse.Namespace) -> Any:
    import armillary

    lengths = [len(document) for document in documents]
    return armillary.data.pack(documents, row_length=given.row_length, lengths=lengths)


def _open_armillary(
    strategy: Any, documents: list[np.ndarray], given: argparse.Namespace
) -> Iterator[Any]:
    import armillary

    source = armillary.data.from_random_access(
        _pack(documents, given),
        batch_size=given.batch_size,
        shuffle_seed=0,
        repeat=True,
    )
    return iter(strategy.distribute_dataset(source))


def _open_mixture(
    strategy: Any, documents: list[np.ndarray], given: argparse.Namespace
) -> Iterator[Any]:
    import armillary

    source = armillary.data.mix(
        {"even": _pack(documents[::2], given), "odd": _pack(documents[1::2], given)},
        {0: [0.7, 0.3], 100: [0.5, 0.5]},
        batch_size=given.batch_size,
        shuffle_seed=0,
    )
    return iter(strategy.distribute_dataset(source))


def _open_grain(
    strategy: Any,
    documents: list[np.ndarray],
    given: argparse.Namespace,
    num_threads: int = 1,
) -> Iterator[Any]:
    import grain
    import jax

    rows = grain.MapDataset.source(_pack(documents, given)).shuffle(seed=0).repeat()
    own = rows[jax.process_index() :: jax.process_count()]
    batches = own.batch(given.batch_size // jax.process_count())
    options = grain.ReadOptions(num_threads, prefetch_buffer_size=_NUM_AHEAD)
    return _place(strategy, iter(batches.to_iter_dataset(options)))


def _open_torch(
    strategy: Any, documents: list[np.ndarray], given: argparse.Namespace
) -> Iterator[Any]:
    import jax

    data: Any = importlib.import_module("torch.utils.data")
    rows = _pack(documents, given)
    sampler = data.DistributedSampler(
        rows, num_replicas=jax.process_count(), rank=jax.process_index()
    )
    loader = data.DataLoader(
        rows,
        batch_size=given.batch_size // jax.process_count(),
        sampler=sampler,
        drop_last=True,
    )

    def read() -> Iterator[Any]:
        while True:
            for batch in loader:
                yield {name: tensor.numpy() for name, tensor in batch.items()}

    return _place(strategy, read())


def _place(strategy: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """Yields batches on all devices, from the rows of each process."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = NamedSharding(strategy.mesh, PartitionSpec("fsdp"))
    for batch in batches:
        yield jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), batch
        )


if __name__ == "__main__":
    main()
