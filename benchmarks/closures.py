"""The process of one contestant of `benchmarks.parameter_server`.

    python -m benchmarks.closures --contestant armillary --bytes 1024 --workers 2

It speaks `benchmarks.protocol`, where a step is one closure. All contestants have the
same variables, four equal arrays of float32 that begin with zeros, and each closure
subtracts the same from every element, so that the variables tell how many have run.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.protocol import write_message
from benchmarks.worker import find_versions, replying, serve

CONTESTANTS = {
    "copies": "benchmarks.contestants.copies:Copies",
    "armillary": "benchmarks.contestants.parameter_server:ParameterServerContestant",
    "tensorflow": "benchmarks.peers.parameter_server:TensorFlowContestant",
}
NUM_VARIABLES = 4
# A power of 2: sums of it are exact in float32, whatever their order.
STEP = 2.0**-10


def make_shapes(num_bytes: int) -> list[tuple[int, ...]]:
    """Returns the shapes of the variables.

    Raises:
        ValueError: If the bytes are no multiple of 16.
    """
    size, rest = divmod(num_bytes, NUM_VARIABLES * 4)
    if rest or size < 1:
        raise ValueError(
            f"`num_bytes` is {num_bytes}, but {NUM_VARIABLES} arrays of float32 have a "
            f"positive multiple of {NUM_VARIABLES * 4} bytes. Use "
            f"{max(1, size) * NUM_VARIABLES * 4}."
        )
    return [(size,)] * NUM_VARIABLES


def check_calls(variables: Sequence[Any], num_calls: int) -> float:
    """Returns the number of updates that the variables have had.

    Raises:
        RuntimeError: If it is not the number of calls, anywhere.
    """
    for variable in variables:
        updates = np.asarray(variable) / -STEP
        if not (updates == num_calls).all():
            raise RuntimeError(
                f"After {num_calls} calls, the elements of a variable have had "
                f"{updates.min():.0f} to {updates.max():.0f} updates."
            )
    return float(num_calls)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one contestant until its input ends."""
    parser = argparse.ArgumentParser(description="Runs one contestant for a parent.")
    parser.add_argument("--contestant", required=True, choices=CONTESTANTS)
    parser.add_argument("--bytes", required=True, type=int)
    parser.add_argument("--workers", required=True, type=int)
    given = parser.parse_args(arguments)
    with replying() as replies:
        start = time.perf_counter()
        module, _, name = CONTESTANTS[given.contestant].partition(":")
        contestant = getattr(importlib.import_module(module), name)()
        contestant.setup(make_shapes(given.bytes), given.workers)
        # All workers have compiled then: each gets calls while the others do it.
        contestant.run(8 * given.workers)
        ready = {
            "event": "ready",
            "versions": find_versions(),
            "setup_seconds": time.perf_counter() - start,
            "facts": contestant.facts,
        }
        write_message(replies, ready)
        serve(contestant, sys.stdin, replies)


if __name__ == "__main__":
    main()
