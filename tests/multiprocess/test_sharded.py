"""Tests that state divided between processes gives the numbers of one device."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import armillary
from tests.multiprocess import sharded
from tests.multiprocess.conftest import run_job
from tests.problems import read_state

pytestmark = pytest.mark.slow


def test_two_processes_with_divided_state_do_what_one_device_does(tmp_path: Path):
    run_dir = tmp_path / "run"
    alone = sharded.Trainer(armillary.MirroredStrategy(jax.devices()[:2]), seed=5)
    alone.train(2)
    manager = sharded.make_manager(alone, run_dir / "of_one")
    manager.save()
    manager.sync()

    outcome = run_job(tmp_path, "sharded", processes=2, devices=2, run_dir=str(run_dir))
    assert outcome.codes == [0, 0], outcome.log
    first, second = outcome.results
    check_mistakes(first.pop("mistakes"), second.pop("mistakes"))
    # Each has the half of a batch; of 8 rows as well.
    assert first["rows"] == second["rows"] == [8]
    assert first == second

    assert first["repr"] == (
        "ShardedStrategy(data=1, fsdp=2, tensor=2, cpu, 1 replica, 2 processes)"
    )
    check_numbers(first, tmp_path)
    assert first["resume"] == [[0, 3], first["train"]["state"]]
    assert first["moved"] == [sharded.digests(read_state(alone))] * 2
    planned = json.loads(first["plan"])
    assert planned["mesh"] == {"data": 4, "fsdp": 2, "tensor": 2}
    assert planned["global_batch"] == 40
    check_part(first["part"], sharded.digests(read_state(alone)))
    check_that_one_process_goes_on(run_dir, first["train"]["state"])
    text, total = first["bad"]
    assert "in 1 of 1 arrays, at step 2 of the 2" in text
    assert "first/kernel: 1 value" in text
    assert total == 64 * 32 + 4
    # One process writes.
    assert len(list((run_dir / "summary").glob("events*"))) == 1
    assert "train | step:      5" in outcome.errors[0]
    assert "train |" not in outcome.errors[1]


def check_numbers(job: dict[str, Any], folder: Path) -> None:
    """Compares with one process that has as many devices."""
    devices = jax.devices()[:4]
    strategy = armillary.ShardedStrategy(sharded.SHAPE, sharded.RULES, devices)
    # A sum of two numbers does not depend on their order.
    assert job["train"] == sharded.train(strategy, folder / "alone")
    assert job["train"]["step"] == sharded.NUM_STEPS
    assert job["train"]["evaluated"]["count"] == 21
    own = sharded.own_loop(strategy)
    np.testing.assert_allclose(job["own_loop"]["losses"], own["losses"], 1e-6)
    np.testing.assert_allclose(job["own_loop"]["gathered"], own["gathered"], 1e-5)
    assert job["own_loop"]["shapes"] == [[8, 8], [4, 4]]


def check_part(part: dict[str, Any], expected: dict[str, str]) -> None:
    """The model equals the checkpoint, bit for bit; everything else is unchanged."""
    model = {f"trainer/{p}": x for p, x in expected.items() if p.startswith("model/")}
    assert part["restored"] == model
    assert "trainer/model/first/kernel" in model
    assert part["kept"]
    assert all(part["kept"])
    assert "examples: 49 in the state, 50 in the program" in part["differences"][0]
    assert part["epoch"] == 0


def check_that_one_process_goes_on(run_dir: Path, expected: dict[str, str]) -> None:
    """Restores what the job has saved, on other devices."""
    strategies = [armillary.MirroredStrategy()]
    assert sharded.move(strategies, run_dir / "whole") == [expected]


def check_mistakes(first: dict[str, str], second: dict[str, str]) -> None:
    index = "`devices` has no device of process {} of 2, but all processes run"
    assert index.format(1) in first.pop("devices")
    assert index.format(0) in second.pop("devices")
    assert first == second
    assert "for 3 devices, but there are 4 in 2 processes. Choose" in first["sizes"]
    for name in ("part", "part in a scope"):
        assert "spans non-addressable" in first[name]
        assert "`strategy.gather(array, axis=0)` returns the whole" in first[name]
