"""Tests of Keras with a different backend, and of a program without Keras."""

import os
import subprocess
import sys

import pytest

from tests.patience import patience

pytestmark = pytest.mark.slow

CALLS = """
import armillary, keras, numpy

def make_in_scope():
    with strategy.scope():
        keras.Sequential()

strategy = armillary.MirroredStrategy(["cpu:0"])
data = armillary.data.from_arrays({"x": numpy.ones(2)}, batch_size=2)
print("batches:", len(list(strategy.distribute_dataset(data))))
for call in (
    lambda: armillary.Checkpoint(mean=keras.metrics.Mean()),
    lambda: armillary.keras.KerasTrainer(keras.Model(), []),
    make_in_scope,
):
    try:
        call()
    except ImportError as error:
        print(error)
"""


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=patience(120),
    )


def test_another_backend_matters_to_objects_of_a_step_alone(keras):
    """A library that imports Keras, as TensorFlow does, may be there for other ends."""
    del keras
    batches, *errors = run(CALLS, KERAS_BACKEND="numpy").stdout.splitlines()
    assert batches == "batches: 1"
    assert len(errors) == 3
    for error in errors:
        assert error.startswith("Keras runs on the backend 'numpy', but")
        assert 'os.environ["KERAS_BACKEND"] = "jax"' in error


def test_without_keras_the_extra_is_named():
    code = (
        "import sys; sys.modules['keras'] = None; import armillary\n"
        "armillary.keras.KerasTrainer(None, None)"
    )
    error = run(code).stderr.splitlines()[-1]
    assert error.startswith("ImportError: Keras, on which `armillary.keras` runs, is")
    assert "pip install '.[keras]'" in error


def test_a_backend_that_is_not_installed_is_no_missing_keras(keras):
    """TensorFlow is Keras' own choice."""
    del keras
    code = (
        "import sys; sys.modules['tensorflow'] = None; import armillary\n"
        "armillary.keras.KerasTrainer(None, None)"
    )
    error = run(code, KERAS_BACKEND="tensorflow").stderr.splitlines()[-1]
    assert error.startswith("ImportError: Keras, on which `armillary.keras` runs, can")
    assert "tensorflow" in error
    assert 'os.environ["KERAS_BACKEND"] = "jax"` before the first `import' in error
