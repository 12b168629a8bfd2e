"""Tests that several processes train a GPT, and drawn models, as one device does."""

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from tests.distribute import generated_models as generated
from tests.multiprocess import models
from tests.multiprocess.conftest import DEADLINE, Outcome, run_program

pytestmark = pytest.mark.slow
SEEDS = [2, 6]


def run(folder: Path, scenario: str, processes: int, **options: Any) -> Outcome:
    program = Path(models.__file__)
    outcome = run_program(
        program, folder, scenario, processes, 2, seconds=3 * DEADLINE, **options
    )
    assert outcome.codes == [0] * processes, outcome.log
    assert all(found == outcome.results[0] for found in outcome.results)
    return outcome


@functools.cache
def train_gpt_alone() -> list[float]:
    return models.train_gpt(armillary.OneDeviceStrategy("cpu:0"))


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_gpt_has_the_losses_of_one_device(tmp_path, processes):
    (found, *_) = run(tmp_path, "gpt", processes).results
    assert found.keys() == {"fsdp", "fsdp and tensor", "hybrid"}
    for losses in found.values():
        np.testing.assert_allclose(losses, train_gpt_alone(), rtol=1e-5)


@pytest.mark.parametrize("processes", [2, 4])
def test_drawn_models_lie_where_they_are_annotated(tmp_path, processes):
    (found, *_) = run(tmp_path, "drawn", processes, seeds=SEEDS).results
    assert len(found) == len(SEEDS) * len(generated.LIBRARIES)
    alone = armillary.OneDeviceStrategy("cpu:0")
    for seed in SEEDS:
        drawn = generated.draw(seed, {"data": processes, "model": 2})
        for library, make in generated.LIBRARIES.items():
            expected = make(alone, drawn, jnp.float32).train(models.NUM_STEPS)
            trained = found[f"{library} {seed}"]
            assert trained["misplaced"] == []
            np.testing.assert_allclose(trained["losses"], expected, rtol=1e-5)
