import os
import subprocess
import sys

import pytest


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


@pytest.mark.slow
def test_objects_of_another_backend_are_an_error_before_a_step(keras):
    del keras
    code = "import armillary, keras\narmillary.Checkpoint(mean=keras.metrics.Mean())\n"
    result = run(code, KERAS_BACKEND="numpy")
    error = result.stderr.splitlines()[-1]
    assert error.startswith("ImportError: Keras runs on the backend 'numpy', but")


@pytest.mark.slow
def test_another_backend_matters_to_models_of_a_strategy_alone(keras):
    """A library that imports Keras, as TensorFlow does, may be there for other ends."""
    del keras
    code = (
        "import armillary, keras, numpy\n"
        'strategy = armillary.MirroredStrategy(["cpu:0"])\n'
        'data = armillary.data.from_arrays({"x": numpy.ones(2)}, batch_size=2)\n'
        "print('batch', len(list(strategy.distribute_dataset(data))))\n"
        "with strategy.scope(): keras.Sequential()\n"
    )
    result = run(code, KERAS_BACKEND="numpy")
    assert "batch 1" in result.stdout
    error = result.stderr.splitlines()[-1]
    assert error.startswith("ImportError: Keras runs on the backend 'numpy', but")


@pytest.mark.slow
def test_without_keras_the_extra_is_named():
    code = (
        "import sys; sys.modules['keras'] = None; import armillary\n"
        "armillary.keras.KerasTrainer(None, None)"
    )
    error = run(code).stderr.splitlines()[-1]
    assert error.startswith("ImportError: Keras, on which `armillary.keras` runs, is")
    assert 'pip install "armillary[keras]"' in error


@pytest.mark.slow
def test_another_backend_is_an_error_of_a_trainer_too(keras):
    del keras
    code = "import armillary, keras; armillary.keras.KerasTrainer(keras.Model(), [])"
    error = run(code, KERAS_BACKEND="numpy").stderr.splitlines()[-1]
    assert error.startswith("ImportError: Keras runs on the backend 'numpy', but")
