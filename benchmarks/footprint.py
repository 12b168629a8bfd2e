"""Compares the size of libraries: their import, their files, and their dependencies.

    python -m benchmarks.footprint --libraries armillary keras kauldron

Each library is looked at where it is installed: in the environment of a peer, or else
in this one. A dependency is a distribution that the library requires, also through
others, without extras. Compiled Python files do not count towards sizes. Counts and
sizes are the same on every machine of the same kind, but times are not.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.environments import find_pythons
from benchmarks.processes import REPOSITORY
from benchmarks.report import add_measurement, make_parser

_DEADLINE_SECONDS = 600


class Library(NamedTuple):
    """A library as `pip` and as Python know it.

    Attributes:
        distribution: The name that `pip` installs.
        module: A module with which its users begin to train.
        names: Attributes that have to be read, if the module imports others late.
    """

    distribution: str
    module: str
    names: tuple[str, ...] = ()


LIBRARIES = {
    "armillary": Library("armillary", "armillary", ("Controller", "StandardTrainer")),
    "jax": Library("jax", "jax"),
    "flax": Library("flax", "flax.nnx"),
    "orbax": Library("orbax-checkpoint", "orbax.checkpoint"),
    "keras": Library("keras", "keras"),
    "tunix": Library("google-tunix", "tunix"),
    "kauldron": Library("kauldron", "kauldron.kd", ("train",)),
    "levanter": Library("levanter", "levanter.trainer"),
    "lightning": Library("lightning", "lightning.pytorch"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = make_parser("footprint", "Compares imports, files and dependencies.")
    parser.add_argument(
        "--libraries", nargs="+", choices=LIBRARIES, default=[*LIBRARIES]
    )
    parser.add_argument("--peer-python", nargs="+", default=[], metavar="NAME=PATH")
    parser.add_argument("--imports", type=int, default=5, metavar="N")
    given = parser.parse_args(arguments)
    pythons = find_pythons(given.peer_python)
    found = {
        name: measure(name, pythons.get(name, sys.executable), given.imports)
        for name in given.libraries
    }
    help_seconds = time_processes(
        [sys.executable, "-m", "armillary", "--help"], given.imports
    )
    add_measurement(
        given.json, "footprint", {"libraries": found, "help_seconds": help_seconds}
    )
    Console(width=120).print(make_table(found))
    for name, record in found.items():
        if "problem" in record:
            line = f"{name} is left out: {record['problem']}"
            Console().print(line, markup=False, soft_wrap=True)
    Console().print(
        f"`armillary --help`: {statistics.median(help_seconds):.2f} s, median of "
        f"{len(help_seconds)} processes.",
        markup=False,
    )


def measure(name: str, python: str, num_imports: int) -> dict[str, Any]:
    """Returns the record of a library, or its `problem`.

    Args:
        name: One of `LIBRARIES`.
        python: The interpreter that has the library.
        num_imports: How many processes import it. One more fills caches before.
    """
    library = LIBRARIES[name]
    words = [library.distribution, library.module, *library.names]
    command = [python, "-m", "benchmarks.peers.footprint", *words]
    seconds = []
    record: dict[str, Any] = {}
    for _ in range(num_imports + 1):
        ended = subprocess.run(
            command,
            capture_output=True,
            check=False,
            cwd=REPOSITORY,
            env={**os.environ, "KERAS_BACKEND": "jax"},
            text=True,
            timeout=_DEADLINE_SECONDS,
        )
        if ended.returncode:
            last = ended.stderr.strip().splitlines()[-1:] or ["no message"]
            return {"problem": last[0]}
        record = json.loads(ended.stdout.splitlines()[-1])
        seconds.append(record.pop("import_seconds"))
    return {**record, "import_seconds": seconds[1:]}


def time_processes(command: Sequence[str], count: int) -> list[float]:
    """Returns the seconds of some processes, after one that is not counted."""
    seconds = []
    for _ in range(count + 1):
        start = time.perf_counter()
        subprocess.run(
            command,
            check=True,
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            timeout=_DEADLINE_SECONDS,
        )
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def make_table(found: Mapping[str, dict[str, Any]]) -> Table:
    """Returns the table of the records, by name of the library."""
    table = Table(title="Footprint", pad_edge=False)
    table.add_column("library")
    for title in (
        "import",
        "modules",
        "own files",
        "with dependencies",
        "dependencies",
    ):
        table.add_column(title, justify="right")
    for name, record in found.items():
        if "problem" not in record:
            table.add_row(*make_row(name, record))
    return table


def make_row(name: str, record: Mapping[str, Any]) -> list[str]:
    """Returns the cells of a library, as texts."""
    return [
        f"{name} {record['version']}",
        f"{statistics.median(record['import_seconds']):.2f} s",
        f"{record['num_modules']:,}",
        f"{record['own_bytes'] / 1e6:,.1f} MB",
        f"{record['all_bytes'] / 1e6:,.0f} MB",
        f"{record['num_dependencies']}",
    ]


if __name__ == "__main__":
    main()
