"""Proof: a run that is killed at any moment, any number of times, loses nothing.

The number of kills is `ARMILLARY_SOAK_KILLS`, 4 by default and 100 in `make soak`. A
third of them hits a program while it starts or restores, a third while it trains, and a
third is aimed at the middle of a save in the background.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.soak_program import (
    BATCH_SIZE,
    NUM_EXAMPLES,
    SAVE_INTERVAL,
    STEPS_PER_LOOP,
)

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_KILLS = int(os.environ.get("ARMILLARY_SOAK_KILLS", "4"))
SEED = int(os.environ.get("ARMILLARY_SOAK_SEED", "0"))
# A program that says nothing for so long hangs: that is a failure, and no kill of ours.
PATIENCE_SECONDS = 300.0
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
        self.has_hung = threading.Event()
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
        patience = threading.Timer(PATIENCE_SECONDS, self.give_up)
        patience.start()
        line = self.process.stdout.readline()
        patience.cancel()
        assert not self.has_hung.is_set(), "The program hangs."
        assert line, self.errors.read_text()
        return int(line)

    def give_up(self) -> None:
        """Ends a program that hangs, so that nobody waits for it."""
        self.has_hung.set()
        self.process.kill()

    def wait_for_save(self) -> None:
        """Waits until a save is being written."""
        deadline = time.monotonic() + 20
        while not is_saving(self.directory) and time.monotonic() < deadline:
            time.sleep(0.0005)

    def kill(self) -> None:
        self.process.kill()
        self.end(-9, timeout=60)

    def finish(self) -> dict[str, Any]:
        """Waits for the end; returns the digests of the final state."""
        self.end(0, timeout=600)
        return json.loads((self.directory / "final.json").read_text())

    def end(self, returncode: int, timeout: float) -> None:
        self.process.communicate(timeout=timeout)
        said = self.errors.read_text()
        assert self.process.returncode == returncode, said
        # The checkpoint before it would take its place, and the end would be the same.
        assert "damaged" not in said, said


def is_saving(directory: Path) -> bool:
    return any((directory / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    """Returns a function that starts programs, none of which outlives the test."""
    programs: list[Program] = []

    def start(name: str) -> Program:
        programs.append(Program(tmp_path / name))
        return programs[-1]

    yield start
    for program in programs:
        program.process.kill()
        program.process.communicate()


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_that_is_killed_at_random_moments_ends_as_one_that_is_not(
    tmp_path, start
):
    whole = start("whole")
    assert whole.read_step() == 0
    expected = whole.finish()
    chance = random.Random(SEED)
    start_seconds = 3.0
    starts: list[int] = []
    num_half_saves = reached = 0

    for number in range(NUM_KILLS):
        program = start("killed")
        if number % 3 == 0:
            time.sleep(chance.uniform(0, 1.2) * start_seconds)
        else:
            starts.append(program.read_step())
            start_seconds = time.monotonic() - program.started_at
            # A save begins after the one before is on disk: two can be lost at most.
            assert starts[-1] >= reached - 2 * SAVE_INTERVAL
            for _ in range(chance.randint(2, 12)):
                reached = program.read_step()
            if number % 3 == 2:
                program.wait_for_save()
            time.sleep(chance.uniform(0, 0.02))
        program.kill()
        num_half_saves += is_saving(tmp_path / "killed")
    last = start("killed")
    starts.append(last.read_step())
    assert starts[-1] >= reached - 2 * SAVE_INTERVAL
    final = last.finish()

    assert final == expected
    assert_every_example_counted_once(final["seen"])
    # What was killed was a run that moved on from its checkpoints, also within saves.
    assert starts == sorted(starts)
    assert 0 < starts[-1] < NUM_STEPS
    assert all(start % STEPS_PER_LOOP == 0 for start in starts)
    assert num_half_saves >= NUM_KILLS // 10


def assert_every_example_counted_once(seen: Any) -> None:
    ids = [int(example) for batch in seen for example in batch]
    assert len(ids) == NUM_STEPS * BATCH_SIZE
    for start in range(0, len(ids) - NUM_EXAMPLES + 1, NUM_EXAMPLES):
        epoch = ids[start : start + NUM_EXAMPLES]
        assert sorted(epoch) == list(range(NUM_EXAMPLES))
