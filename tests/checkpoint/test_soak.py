"""Proof: a run that is killed at any moment, any number of times, loses nothing.

The number of kills is `ARMILLARY_SOAK_KILLS`, 10 by default and 100 in `make soak`. A
third of them hits a program while it starts or restores, a third while it trains, and a
third is aimed at the middle of a save in the background.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.soak_program import (
    BATCH_SIZE,
    NUM_EXAMPLES,
    STEPS_PER_LOOP,
)

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_KILLS = int(os.environ.get("ARMILLARY_SOAK_KILLS", "10"))
SEED = int(os.environ.get("ARMILLARY_SOAK_SEED", "0"))
# Enough that the run cannot end before it was killed that often.
STEPS_PER_KILL = 10 * STEPS_PER_LOOP
NUM_STEPS = STEPS_PER_KILL * (NUM_KILLS + 1)


class Program:
    """The training program in a process of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.errors = directory / "stderr"
        self.started_at = time.monotonic()
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.checkpoint.soak_program"),
                    *(str(directory), str(NUM_STEPS)),
                ],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )

    def read_step(self) -> int:
        """Waits for the next report."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()
        return int(line)

    def wait_for_save(self) -> None:
        """Waits until a save is being written."""
        deadline = time.monotonic() + 20
        while not is_saving(self.directory) and time.monotonic() < deadline:
            time.sleep(0.0005)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)
        assert self.process.returncode == -9, self.errors.read_text()

    def finish(self) -> dict[str, Any]:
        """Waits for the end; returns the digests of the final state."""
        self.process.communicate(timeout=600)
        assert self.process.returncode == 0, self.errors.read_text()
        return json.loads((self.directory / "final.json").read_text())


def is_saving(directory: Path) -> bool:
    return any((directory / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


@pytest.mark.slow
def test_a_run_that_is_killed_at_random_moments_ends_as_one_that_is_not(
    tmp_path: Path,
) -> None:
    whole = Program(tmp_path / "whole")
    assert whole.read_step() == 0
    expected = whole.finish()
    chance = random.Random(SEED)
    start_seconds = 3.0
    starts: list[int] = []
    num_half_saves = 0

    for number in range(NUM_KILLS):
        program = Program(tmp_path / "killed")
        if number % 3 == 0:
            time.sleep(chance.uniform(0, 1.2) * start_seconds)
        else:
            starts.append(program.read_step())
            start_seconds = time.monotonic() - program.started_at
            for _ in range(chance.randint(2, 12)):
                program.read_step()
            if number % 3 == 2:
                program.wait_for_save()
            time.sleep(chance.uniform(0, 0.02))
        program.kill()
        num_half_saves += is_saving(tmp_path / "killed")
    last = Program(tmp_path / "killed")
    starts.append(last.read_step())
    final = last.finish()

    assert final == expected
    assert_every_example_counted_once(final["seen"])
    # What was killed was a run that moved on from its checkpoints, also within saves.
    assert starts == sorted(starts)
    assert NUM_KILLS // 3 <= starts[-1] < NUM_STEPS
    assert all(start % STEPS_PER_LOOP == 0 for start in starts)
    assert num_half_saves >= NUM_KILLS // 10


def assert_every_example_counted_once(seen: Any) -> None:
    ids = [int(example) for batch in seen for example in batch]
    assert len(ids) == NUM_STEPS * BATCH_SIZE
    for start in range(0, len(ids) - NUM_EXAMPLES + 1, NUM_EXAMPLES):
        epoch = ids[start : start + NUM_EXAMPLES]
        assert sorted(epoch) == list(range(NUM_EXAMPLES))
