"""Tests that each action refuses arguments and outputs that it cannot use.

`tests/meta/test_arguments.py` gives wrong values to each argument.
"""

import functools

import numpy as np
import pytest

from armillary.actions import ConditionalAction, NewBestMetric, PeriodicAction, Profile
from tests.mistakes import mistakes

best = functools.partial(NewBestMetric, higher_is_better=True)
NESTED = {"loss": 1.0, "validation": {"l1": 2.0}}


@mistakes(
    {
        TypeError: {
            "`loss` is 'low' of type str.*one number": lambda _: best("loss")(
                {"loss": "low"}
            ),
            r"`loss` is array\(.*one number": lambda _: best("loss")(
                {"loss": np.zeros(2)}
            ),
            r"`action\[1\]` is 3 of type int.*callable": (
                lambda _: ConditionalAction(bool, [print, 3])
            ),
            r"`action\[1\]` is `<lambda>\(step, m\)`.*with `output`.*fn\(output\):": (
                lambda _: PeriodicAction([print, lambda step, m: None], 10)
            ),
            r"`condition` is `<lambda>\(\)`, but it is called with `output`": (
                lambda _: ConditionalAction(lambda: True, print)
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
            "`directory` is 'gs://a/b', but traces": (
                lambda _: Profile(at=1, steps=1, directory="gs://a/b")
            ),
        },
        RuntimeError: {
            "`PeriodicAction` was called, but it has no step counter": (
                lambda _: PeriodicAction(print, 10)(None)
            ),
        },
    }
)
def test_arguments_that_an_action_cannot_use_are_errors(call, error, message, tmp_path):
    with pytest.raises(error, match=message):
        call(tmp_path)
