"""Keras' own loop over several processes: the numbers of one."""

import jax
import numpy as np
import pytest

import armillary
from tests.multiprocess import program
from tests.multiprocess.conftest import run_job

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_two_processes_fit_evaluate_and_predict_as_one(keras, job):
    del keras
    first, second = job("fit_keras", processes=2, devices=2)
    expected = program.fit_keras(armillary.OneDeviceStrategy(jax.devices()[0]))
    assert first == second
    for name, values in expected["history"].items():
        np.testing.assert_allclose(first["history"][name], values, rtol=1e-4)
    assert first["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-4)
    predicted = np.array(first["predicted"])
    np.testing.assert_allclose(predicted, expected["predicted"], rtol=1e-3, atol=1e-5)


@pytest.mark.thorough
def test_processes_with_other_weights_are_told_how_to_begin_alike(keras, tmp_path):
    del keras
    options = {"processes": 2, "devices": 1, "seeds": [0, 1]}
    outcome = run_job(tmp_path, "fit_keras", **options)
    assert 0 not in outcome.codes
    for error in outcome.errors:
        assert "PeerError: `model.fit` was called on processes that differ" in error
