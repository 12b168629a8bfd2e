"""A `DatasetCreator` under strategies whose replicas share global batches."""

import jax
import numpy as np
import pytest

import armillary
from armillary.data import InputContext
from tests.mistakes import mistakes

STRATEGIES = {
    "default": armillary.get_strategy,
    "mirrored": lambda: armillary.MirroredStrategy(jax.devices()[:4]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_fit_calls_the_function_once_for_global_batches(problem, name):
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        size = context.get_per_replica_batch_size(16)
        return armillary.data.from_arrays((problem.x, problem.y), batch_size=size)

    def fit(model, data, **options):
        history = model.fit(**data, epochs=2, verbose=0, shuffle=False, **options)
        return history.history

    with STRATEGIES[name]().scope():
        model = problem.make_model()
    creator = armillary.keras.DatasetCreator(dataset_fn)
    history = fit(model, {"x": creator}, validation_data=creator)
    evaluated = model.evaluate(creator, verbose=0, return_dict=True)
    # Once for training, once for validation, once for the evaluation.
    assert contexts == [InputContext(1, 0, 1)] * 3

    arrays = {"x": problem.x, "y": problem.y, "batch_size": 16}
    own = problem.make_model()
    expected = fit(own, arrays, validation_data=(problem.x, problem.y))
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-4)
    expected = own.evaluate(**arrays, verbose=0, return_dict=True)
    assert evaluated == pytest.approx(expected, rel=1e-4)


@mistakes(
    {
        TypeError: {
            "`dataset_fn` is 3": lambda: armillary.keras.DatasetCreator(3),
            "`input_options` is 'drop'": lambda: armillary.keras.DatasetCreator(
                list, input_options="drop"
            ),
        },
    }
)
def test_wrong_arguments_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_targets_next_to_it_are_refused(problem):
    creator = armillary.keras.DatasetCreator(lambda context: None)
    with STRATEGIES["mirrored"]().scope():
        model = problem.make_model()
    with pytest.raises(ValueError, match=r"`model\.fit` was given `y` together"):
        model.fit(creator, problem.y)
