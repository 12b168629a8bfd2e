"""The process of one contestant: builds it, warms it up, runs what the parent asks for.

    python -m benchmarks.worker --contestant reference-scan --task mlp \
        --steps-per-loop 100

It needs the standard library and NumPy; a contestant imports its framework when it is
set up. `benchmarks.protocol` describes the lines it reads and writes.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import IO

from benchmarks.contestants import CONTESTANTS, Contestant, make_contestant
from benchmarks.protocol import (
    CONVOLUTIONS,
    DATA_KINDS,
    DTYPES,
    SIZES,
    Options,
    UnsupportedError,
    write_message,
)
from benchmarks.tasks import TASKS, make_task

_REPORTED = {
    "armillary": "armillary",
    "flax": "flax",
    "grain": "grain",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "kauldron": "kauldron",
    "keras": "keras",
    "lightning": "lightning",
    "numpy": "numpy",
    "optax": "optax",
    "orbit": "tf-models-official",
    "tensorflow": "tensorflow",
    "torch": "torch",
    "tunix": "google-tunix",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one contestant until its input ends."""
    given = _parse(arguments)
    options = Options(
        steps_per_loop=given.steps_per_loop,
        devices=given.devices,
        data=given.data,
        dtype=given.dtype,
        convolutions=given.convolutions,
    )
    with replying() as replies:
        start = time.perf_counter()
        contestant = make_contestant(given.contestant)
        contestant.setup(make_task(given.task, given.size), options)
        contestant.run(options.steps_per_loop)  # This compiles everything.
        seconds = time.perf_counter() - start
        _write_ready(replies, contestant, seconds)
        serve(contestant, sys.stdin, replies)


@contextlib.contextmanager
def replying() -> Iterator[IO[str]]:
    """Yields the stream to the parent, and reports errors of the code inside to it."""
    # Libraries print to standard output; the protocol keeps the real one to itself.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        yield replies
    except UnsupportedError as error:
        write_message(replies, {"event": "error", "message": str(error), "skip": True})
    except Exception as error:
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        write_message(replies, {"event": "error", "message": message, "skip": False})
        # Threads of a framework that failed halfway may never end by themselves.
        replies.close()
        os._exit(1)


def serve(contestant: Contestant, requests: IO[str], replies: IO[str]) -> None:
    """Answers requests until one asks to quit or there are no more.

    Args:
        contestant: The object that runs the steps.
        requests: Lines to read.
        replies: Where to write.
    """
    # Not `for line in requests`, which may read ahead.
    while line := requests.readline():
        request = json.loads(line)
        if "quit" in request:
            return
        steps = request["run"]
        start = time.perf_counter()
        loss = contestant.run(steps)
        seconds = time.perf_counter() - start
        write_message(
            replies,
            {
                "event": "ran",
                "steps": steps,
                "seconds": seconds,
                "loss": float(loss),
            },
        )


def find_versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that are in use."""
    versions = {"python": platform.python_version()}
    for module, distribution in _REPORTED.items():
        if module in sys.modules:
            try:
                versions[module] = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                found = getattr(sys.modules[module], "__version__", "unknown")
                versions[module] = str(found)
    return versions


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs one contestant for a parent.")
    parser.add_argument("--contestant", required=True, choices=sorted(CONTESTANTS))
    parser.add_argument("--task", required=True, choices=sorted(TASKS))
    parser.add_argument("--steps-per-loop", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--data", choices=DATA_KINDS, default="memory")
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--convolutions", choices=CONVOLUTIONS, default="stock")
    parser.add_argument("--size", choices=SIZES, default="full")
    return parser.parse_args(arguments)


def _write_ready(replies: IO[str], contestant: Contestant, seconds: float) -> None:
    write_message(
        replies,
        {
            "event": "ready",
            "versions": find_versions(),
            "setup_seconds": seconds,
            "facts": getattr(contestant, "facts", {}),
        },
    )


if __name__ == "__main__":
    main()
