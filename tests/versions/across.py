"""Trains on each set of releases and continues with another set.

Each Python imports every module and runs `examples/digits.py`. Then the second Python
continues from a middle checkpoint of the first, the third from one of the second, and
the first from one of the last. The losses must equal the losses of the run that was not
interrupted. Nothing of the library is imported here::

    python -m tests.versions.across .venv-oldest/bin/python .venv/bin/python
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
IMPORT_ALL = """
import importlib, pkgutil, armillary
for module in pkgutil.walk_packages(armillary.__path__, "armillary."):
    if not module.name.endswith(".__main__"):
        importlib.import_module(module.name)
for name in armillary.__all__:
    getattr(armillary, name)
"""
# Two compilers need not round alike, and each step builds on the last one.
TOLERANCE = 0.01


def run(python: str, *arguments: str) -> None:
    """Runs Python in the repository and shows what it says only if it fails."""
    result = subprocess.run(
        [python, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode != 0:
        sys.exit(f"{result.stdout}\n{python} failed with {result.returncode}.")


def train(python: str, directory: Path, options: argparse.Namespace) -> str:
    """Runs the example; returns the release of JAX that it ran with."""
    run(
        python,
        "examples/digits.py",
        "--devices=4",
        f"--run-dir={directory}",
        f"--cache-dir={directory / 'compiled'}",
        f"--steps={options.steps}",
        f"--steps-per-loop={options.steps_per_loop}",
    )
    return read(directory, "start")[-1]["jax"]


def read(directory: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the records of one kind of a run's training."""
    lines = (directory / "train" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record for record in records if record["record"] == kind]


def losses(directory: Path) -> dict[int, float]:
    """Returns the mean loss of each loop by its last step, of the last run there."""
    start = read(directory, "start")[-1]["time"]
    return {
        record["step"]: record["values"]["loss"]
        for record in read(directory, "train")
        if record["time"] >= start
    }


def cut(directory: Path, copy: Path) -> int:
    """Copies a run as it was before its last checkpoint; returns the one before."""
    shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("compiled", "DONE"))
    folders = {
        int(path.name.rpartition("_")[2]): path
        for path in (copy / "checkpoints").glob("checkpoint_*")
    }
    *_, middle, last = sorted(folders)
    shutil.rmtree(folders[last])
    return middle


def compare(name: str, found: dict[int, float], expected: dict[int, float]) -> None:
    """Ends the program if a resumed run took other steps, or had other losses."""
    print(f"{name}: loss {found}", flush=True)
    if list(found) != list(expected):
        sys.exit(f"{name}: loops ended at {list(found)}, not {list(expected)}.")
    for step, loss in expected.items():
        if not math.isclose(found[step], loss, rel_tol=TOLERANCE):
            sys.exit(f"{name}: the loss at step {step} is {found[step]}, not {loss}.")


def main() -> None:
    """Runs all of it, in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="+")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--steps-per-loop", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(2) as pool:
        places = [Path(temporary) / str(i) for i in range(len(options.pythons))]

        def begin(python: str, place: Path) -> str:
            run(python, "-c", IMPORT_ALL)
            return train(python, place, options)

        releases = list(pool.map(begin, options.pythons, places))
        for release, place in zip(releases, places, strict=True):
            print(f"JAX {release}: loss {losses(place)}", flush=True)

        if len(releases) == 1:
            print("There is one set of releases, and no other set to continue with.")
            return

        def go_on(number: int) -> None:
            place, other = places[number], (number + 1) % len(places)
            name = f"JAX {releases[number]}, then {releases[other]}"
            copy = Path(temporary) / f"after-{place.name}"
            middle = cut(place, copy)
            train(options.pythons[other], copy, options)
            rest = {step: loss for step, loss in losses(place).items() if step > middle}
            compare(name, losses(copy), rest)

        list(pool.map(go_on, range(len(places))))
    print(f"All {len(places)} sets continue where another set was stopped.")


if __name__ == "__main__":
    main()
