"""Measures how long Armillary's own modules take on top of `import jax, flax`.

They are imported when the first name of `armillary` is used.

python -m benchmarks.import_time
"""

import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks.processes import REPOSITORY
from benchmarks.report import add_measurement, make_parser

_CODE = """
import time
import jax, flax
from flax import nnx
start = time.perf_counter()
import armillary
armillary.Controller
print(time.perf_counter() - start)
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = make_parser("import_time", "Measures the time of the import.")
    parser.add_argument("--processes", type=int, default=9)
    given = parser.parse_args(arguments)
    measurement = measure(given.processes)
    seconds = measurement["seconds"]
    Console().print(
        f"import armillary, after jax and flax: {measurement['median']:.3f} s, median "
        f"of {len(seconds)} processes ({min(seconds):.3f} to {max(seconds):.3f}).",
        soft_wrap=True,
    )
    add_measurement(given.json, "import_time", measurement)


def measure(num_processes: int) -> dict[str, Any]:
    """Returns the seconds of each process and their median.

    Args:
        num_processes: Processes that count; one more before them fills the caches of
            the file system and of compiled modules.
    """
    seconds = [_import_once() for _ in range(num_processes + 1)][1:]
    return {"median": statistics.median(seconds), "seconds": seconds}


def _import_once() -> float:
    result = subprocess.run(
        [sys.executable, "-c", _CODE],
        capture_output=True,
        check=True,
        cwd=REPOSITORY,
        text=True,
        timeout=300,
    )
    return float(result.stdout)


if __name__ == "__main__":
    main()
