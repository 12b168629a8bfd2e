"""Measures a matrix of cases: `python -m benchmarks --help`."""

import argparse
import dataclasses
import datetime
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cases import Case, choose_cases, default_cases, quick_cases
from benchmarks.contestants import CONTESTANTS, PEERS
from benchmarks.environments import find_pythons, make_environments
from benchmarks.machine import describe_machine, find_device
from benchmarks.measure import Settings, measure_case
from benchmarks.processes import REPOSITORY
from benchmarks.protocol import CONVOLUTIONS, DATA_KINDS, DTYPES
from benchmarks.report import SCHEMA, list_reasons, make_table, write_document
from benchmarks.tasks import TASKS

_DEFAULT_CONTESTANTS = ("reference-step", "reference-scan", "armillary")
_DESCRIPTION = """\
Measures Armillary and others against hand-written loops, all in turns. Without a
choice of cases it measures a matrix that takes about 25 minutes on 2 cores.
"""
_EPILOG = """\
One case, in a minute:
  python -m benchmarks --tasks mlp --steps-per-loop 100 \\
      --contestants reference-scan armillary

The matrix without a choice, on CPUs:
  every task but `bert-base` at 1, 10 and 100 steps per loop (`bert`: 1 and 10);
  data from Grain and resident on the device for `mlp`, resident for `bert`;
  2 and 4 virtual devices for `mlp`, 2 for `bert`;
  `cnn` with canonical convolutions, and once without.
Elsewhere:
  every task at 1, 10 and 100 steps per loop, the two encoders in bfloat16 as well;
  data resident on the device for `mlp`, and for `bert-base` in bfloat16.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what the arguments choose."""
    given = _parse(arguments)
    console = Console(width=None if Console().is_terminal else 160)
    device = find_device()
    cases = _choose_cases(given, device["platform"])
    folder = given.environments or REPOSITORY
    if given.environments is not None:
        chosen = [name for name in given.contestants or PEERS if name in PEERS]
        for name, reason in make_environments(chosen, folder).items():
            line = f"{name} could not be installed: {reason}"
            console.print(line, markup=False, soft_wrap=True)
    pythons = find_pythons(given.peer_python, folder)
    settings = Settings(
        rounds=2 if given.quick and given.rounds is None else given.rounds or 5,
        seconds_per_burst=given.seconds_per_burst,
        pythons=pythons,
        environment=_environment(device["platform"]),
    )
    names = given.contestants or [*_DEFAULT_CONTESTANTS, *pythons]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "device": device,
        "settings": {
            "rounds": settings.rounds,
            "seconds_per_burst": settings.seconds_per_burst,
        },
        "cases": [],
        "measurements": {},
    }
    for peer in PEERS:
        if peer in names and peer not in pythons:
            console.print(
                f"{peer} is left out: there is no environment for it. Make it with "
                "`make bench-peers`, or name its interpreter with "
                f"`--peer-python {peer}=PATH`."
            )
    names = [name for name in names if name not in PEERS or name in pythons]
    for case, entry in _measure(cases, names, settings, console):
        document["cases"].append(entry)
        console.print(_summary(case, entry), style="dim", soft_wrap=True)
        if given.json is not None:
            write_document(given.json, document)
    console.print(make_table(document["cases"]))
    machine = document["machine"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores; {device['kind']}; "
        f"{_versions(document['cases'])}",
        style="dim",
        soft_wrap=True,
    )
    for line in list_reasons(document["cases"]):
        console.print(line, markup=False, soft_wrap=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS)
    parser.add_argument("--steps-per-loop", nargs="+", type=int, metavar="K")
    parser.add_argument(
        "--devices", nargs="+", type=int, metavar="D", help="virtual CPU devices"
    )
    parser.add_argument("--data", nargs="+", choices=DATA_KINDS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES)
    parser.add_argument("--convolutions", nargs="+", choices=CONVOLUTIONS)
    parser.add_argument(
        "--contestants",
        nargs="+",
        choices=CONTESTANTS,
        help=f"default: {', '.join(_DEFAULT_CONTESTANTS)} and the peers installed",
    )
    parser.add_argument(
        "--peer-python",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="the interpreter of a peer that `make bench-peers` did not install",
    )
    parser.add_argument(
        "--environments",
        type=Path,
        metavar="FOLDER",
        help="a folder for the environments of peers, where missing ones are made",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="bursts of each contestant (default: 5)"
    )
    parser.add_argument(
        "--seconds-per-burst",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="where to write all measurements"
    )
    parser.add_argument("--quick", action="store_true", help="tiny tasks, for tests")
    return parser.parse_args(arguments)


def _choose_cases(given: argparse.Namespace, platform: str) -> list[Case]:
    chosen = (given.steps_per_loop, given.devices, given.data, given.dtype)
    if given.quick:
        cases = quick_cases()
    elif any((*chosen, given.convolutions)):
        cases = choose_cases(
            given.tasks or ("mlp", "many-leaves", "cnn", "bert"),
            given.steps_per_loop or (1, 10, 100),
            given.devices or (1,),
            given.data or ("memory",),
            given.dtype or ("f32",),
            given.convolutions,
        )
    else:
        cases = default_cases(platform)
    return [case for case in cases if given.tasks is None or case.task in given.tasks]


def _measure(
    cases: Sequence[Case], names: Sequence[str], settings: Settings, console: Console
) -> Iterator[tuple[Case, dict[str, Any]]]:
    for number, case in enumerate(cases, start=1):
        taking_part = [
            name
            for name in names
            if (name not in PEERS or case.is_plain)
            # With one step per loop there is nothing to scan.
            and (name != "reference-scan" or case.options.steps_per_loop > 1)
        ]
        if case.size == "small":
            settings = dataclasses.replace(settings, seconds_per_burst=0.1)
        console.print(
            f"{number} of {len(cases)}: {case.task}, {case.mode}", style="dim"
        )
        yield case, measure_case(case, taking_part, settings)


def _summary(case: Case, entry: dict[str, Any]) -> str:
    parts = []
    for name, record in entry["contestants"].items():
        ratio = record.get("ratio")
        text = f"{record['steps_per_second']:,.1f} steps/s"
        parts.append(f"{name} {text}" + (f" ({ratio['median']:.3f})" if ratio else ""))
    missing = [*entry["skipped"], *entry["failed"]]
    return f"    {', '.join(parts)}" + (f"; missing: {missing}" if missing else "")


def _environment(platform: str) -> dict[str, str]:
    if platform == "cpu":
        return {}
    # Up to six processes share the device, and each would reserve most of its memory.
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.15"}


def _versions(cases: Sequence[dict[str, Any]]) -> str:
    versions: dict[str, str] = {}
    for case in cases:
        for record in case["contestants"].values():
            versions |= record["versions"]
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


if __name__ == "__main__":
    # As after Ctrl-C, workers end before this process does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
