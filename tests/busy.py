"""Runs the tests on a busy machine: `make busy`.

Eight loops keep the cores busy, and next to them `make test` must pass three times in a
row, and `make test-all` once. That takes several hours on two cores. Run nothing else
meanwhile, because limits follow the load that each run measures at its start.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

LOOP = "while True: pass"
COMMANDS = (*(("make", "test"),) * 3, ("make", "test-all"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument(
        "--workers", type=int, default=4 * (os.cpu_count() or 1), help="of pytest"
    )
    options = parser.parse_args()

    commands = [[*each, f"WORKERS={options.workers}"] for each in COMMANDS]
    with busy_loops(options.loops):
        codes = run_in_turn(commands)
    sys.exit(max(codes))


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Keeps cores busy with some processes, which are ended at the end."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_in_turn(commands: Sequence[Sequence[str]]) -> list[int]:
    """Runs commands, prints a line for each at the end, and returns exit codes."""
    lines: list[str] = []
    codes: list[int] = []
    for command in commands:
        start = time.monotonic()
        code = subprocess.run(command, check=False).returncode
        minutes = (time.monotonic() - start) / 60
        codes.append(code)
        lines.append(f"{' '.join(command)}: exit code {code} after {minutes:.1f} min")
    sys.stdout.write("\n".join([*lines, ""]))
    return codes


if __name__ == "__main__":
    main()
