"""What each action says to arguments and outputs that it cannot use."""

import functools

import numpy as np
import pytest

from armillary.actions import (
    ConditionalAction,
    EarlyStopping,
    NewBestMetric,
    PeriodicAction,
    Profile,
)
from tests.mistakes import mistakes

best = functools.partial(NewBestMetric, higher_is_better=True)
NESTED = {"loss": 1.0, "validation": {"l1": 2.0}}


def profile(directory, **options):
    return Profile(**{"at": 1, "steps": 1, "directory": directory, **options})


@mistakes(
    {
        TypeError: {
            "`metric` is 3 of type int.*a key of the output": lambda _: best(3),
            "`loss` is 'low' of type str.*one number": lambda _: best("loss")(
                {"loss": "low"}
            ),
            "`loss` is None of type NoneType.*one number": lambda _: best("loss")(
                {"loss": None}
            ),
            r"`action\[1\]` is 3 of type int.*callable": (
                lambda _: ConditionalAction(bool, [print, 3])
            ),
            r"`loss` is array\(.*one number": lambda _: best("loss")(
                {"loss": np.zeros(2)}
            ),
        },
        ValueError: {
            "the function <lambda>.*defined with `def`": (
                lambda directory: best(lambda output: 1.0, directory=directory)
            ),
            "'validation/acc'.*`loss`, `validation/l1`": (
                lambda _: best("validation/acc")(NESTED)
            ),
            "'acc'.*there are none": lambda _: best("acc")(None),
            "`interval` is 0, but it must be": lambda _: PeriodicAction(print, 0),
            "`directory` is 'gs://a/b', but traces": lambda _: profile("gs://a/b"),
        },
        RuntimeError: {
            "`Profile` was called, but.*`action.bind_step_counter": (
                lambda d: profile(d)(None)
            ),
            "`PeriodicAction` was called, but does not know the global step": (
                lambda _: PeriodicAction(print, 10)(None)
            ),
        },
    }
)
def test_what_an_action_cannot_use_is_an_error(call, error, message, tmp_path):
    with pytest.raises(error, match=message):
        call(tmp_path)


@pytest.mark.parametrize("value", ["max", None, 2])
def test_a_direction_that_is_no_truth_value_is_an_error(value):
    message = "`higher_is_better` is .*, but it must be one of True, False. Use one of"
    with pytest.raises(ValueError, match=message):
        NewBestMetric("loss", higher_is_better=value)
    with pytest.raises(ValueError, match=message):
        EarlyStopping(print, "loss", patience=1, higher_is_better=value)
