"""Measures what parameter servers cost: calls a second, and what bounds them.

    python -m benchmarks.parameter_server --json bench.json

A call computes next to nothing: it reads all variables and sends a gradient for each to
an SGD on one server. `ParameterServerStrategy` is compared with TensorFlow's, if `make
bench-peers` has installed it, and with the bound of memory: each call must copy the
variables once on their way to the worker, and the gradients once on their way back.
All take turns, in separate processes. A burst ends when the variables of the scheduling
process are current.
"""

import argparse
import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.closures import CONTESTANTS
from benchmarks.machine import describe_machine
from benchmarks.measure import Bench, Settings
from benchmarks.processes import REPOSITORY, WorkerProcess
from benchmarks.ratios import choose_burst, pair_ratios
from benchmarks.report import add_measurement, make_parser

_PEER_PYTHON = REPOSITORY / ".venv-bench-orbit" / "bin" / "python"
_NOT_INSTALLED = "not installed: run `make bench-peers`"
_SETTINGS = Settings(start_seconds=300.0, burst_seconds=300.0)
# Object stores are slow until their memory has been used once.
_WARM_UP_SECONDS = 5.0
_UNITS = {"KB": 1 << 10, "MB": 1 << 20}

Start = Callable[[str, int, int], WorkerProcess]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = make_parser(
        "parameter_server", "Measures calls a second of parameter servers."
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=parse_size,
        default=[parse_size(size) for size in ("1KB", "4MB", "100MB")],
        metavar="SIZE",
        help="bytes of all variables (default: 1KB 4MB 100MB)",
    )
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds-per-burst", type=float, default=2.0)
    given = parser.parse_args(arguments)
    console = Console(width=None if Console().is_terminal else 120)
    names = given.contestants or list(CONTESTANTS)
    machine, rows = describe_machine(), []
    for num_bytes in given.sizes:
        for num_workers in given.workers:
            row = measure(
                num_bytes, num_workers, names, given.rounds, given.seconds_per_burst
            )
            rows.append(row)
            line = ", ".join(f"{n} {_cell(row, n)}" for n in names)
            text = f"{format_size(num_bytes)}, {num_workers} workers: {line}"
            console.print(text, style="dim", soft_wrap=True)
    console.print(make_table(rows, names))
    load = f"load {machine['load_at_start']:.1f} before"
    console.print(f"{machine['cpu']}, {machine['cores']} cores; {load}", style="dim")
    measurement = {"machine": machine, "rounds": given.rounds, "rows": rows}
    add_measurement(given.json, "parameter_server", measurement)


def parse_size(text: str) -> int:
    """Returns the bytes that `4MB` or `1024` means.

    Raises:
        argparse.ArgumentTypeError: If it means none.
    """
    number, unit = text.strip().upper(), ""
    for name in _UNITS:
        if number.endswith(name):
            number, unit = number[: -len(name)], name
    if not number.isdigit() or int(number) < 1:
        raise argparse.ArgumentTypeError(
            f"`--sizes` has {text!r}, but a size is a whole number of bytes, KB or MB. "
            "Write it as in `--sizes 1KB 4MB 2048`."
        )
    return int(number) * _UNITS.get(unit, 1)


def format_size(num_bytes: int) -> str:
    """Returns bytes as text, such as `4 MB`."""
    for unit, size in reversed(_UNITS.items()):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes} B"


def start_worker(name: str, num_bytes: int, num_workers: int) -> WorkerProcess:
    """Starts one contestant."""
    python = str(_PEER_PYTHON) if name == "tensorflow" else sys.executable
    command = [python, "-m", "benchmarks.closures", "--contestant", name]
    command += ["--bytes", str(num_bytes), "--workers", str(num_workers)]
    return WorkerProcess(name, command, {"JAX_PLATFORMS": "cpu"})


def measure(
    num_bytes: int,
    num_workers: int,
    names: Sequence[str],
    rounds: int,
    seconds_per_burst: float,
    start: Start = start_worker,
) -> dict[str, Any]:
    """Returns the calls a second of each contestant, and ratios to Armillary's.

    Args:
        num_bytes: Bytes of all variables.
        num_workers: How many workers there are.
        names: Contestants.
        rounds: Bursts of each.
        seconds_per_burst: How long a burst is, about.
        start: Starts a contestant.
    """
    bench, bursts = Bench(_SETTINGS), dict[str, int]()
    with contextlib.ExitStack() as stack:
        for name in names:
            if name == "tensorflow" and not _PEER_PYTHON.exists():
                bench.failed[name] = _NOT_INSTALLED
                continue
            bench.add(name, stack.enter_context(start(name, num_bytes, num_workers)))
            if name in bench.records:
                with bench.dropping(name):
                    bursts[name] = _find_burst(bench, name, seconds_per_burst)
        for number in range(rounds):
            bench.run_round(number, bursts)
    seconds = {
        name: [each / bursts[name] for each in record["seconds"]]
        for name, record in bench.records.items()
    }
    return {
        "bytes": num_bytes,
        "workers": num_workers,
        "bursts": bursts,
        "facts": {
            name: {"versions": record["versions"], **record["facts"]}
            for name, record in bench.records.items()
        },
        "missing": bench.failed,
        **compare(seconds),
    }


def compare(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Returns speeds, and the ratio of Armillary's to each other one.

    Args:
        seconds: Seconds of one call by contestant, one for each round.
    """
    ours = seconds.get("armillary")
    return {
        "seconds": {name: list(each) for name, each in seconds.items()},
        "calls_per_second": {
            name: 1 / statistics.median(each) for name, each in seconds.items()
        },
        "ratios": {
            name: dataclasses.asdict(pair_ratios(theirs, ours))
            for name, theirs in seconds.items()
            if ours is not None and name != "armillary"
        },
    }


def make_table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> Table:
    """Returns the table of rows from `measure`."""
    others = [name for name in names if name != "armillary"]
    table = Table(title="Calls a second on one parameter server", pad_edge=False)
    for column in ("variables", "workers", *names):
        table.add_column(column, justify="right")
    for name in others:
        table.add_column(f"armillary / {name}", justify="right")
    for row in rows:
        cells = [format_size(row["bytes"]), str(row["workers"])]
        cells += [_cell(row, name) for name in names]
        table.add_row(*cells, *(_ratio(row, name) for name in others))
    return table


def _find_burst(bench: Bench, name: str, wanted: float) -> int:
    """Warms a contestant up; returns the calls of a burst."""
    calls, spent = 8, 0.0
    while True:
        ran = bench.run(name, calls)
        spent += ran["seconds"]
        burst = choose_burst(ran["seconds"] / calls, wanted, 1)
        if spent >= min(_WARM_UP_SECONDS, 2.5 * wanted) and burst <= 2 * calls:
            return burst
        calls = min(burst, 4 * calls)


def _cell(row: Mapping[str, Any], name: str) -> str:
    if name in row["missing"]:
        reason = row["missing"][name]
        return reason if reason == _NOT_INSTALLED else "failed"
    speed = row["calls_per_second"][name]
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _ratio(row: Mapping[str, Any], name: str) -> str:
    ratio = row["ratios"].get(name)
    if ratio is None:
        return ""
    low, high = ratio["low"], ratio["high"]
    return f"{ratio['median']:.2g} ({low:.2g} to {high:.2g})"


if __name__ == "__main__":
    main()
