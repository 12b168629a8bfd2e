"""`EarlyStopping` requests a stop when patience runs out."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np

from armillary.actions import EarlyStopping


def outputs_until_stop(losses, **options) -> Any:
    reasons = []
    options = {"higher_is_better": False, **options}
    stopping = EarlyStopping(reasons.append, "loss", **options)
    for count, loss in enumerate(losses, start=1):
        stopping({"loss": loss})
        if reasons:
            return count, reasons[0]
    return None


def test_stops_after_patience_outputs_without_improvement():
    count, reason = outputs_until_stop([3, 2, 2, 2.5, 1], patience=2)

    assert count == 4
    assert reason == (
        "`loss` has not improved by more than 0 for 2 outputs in a row; "
        "the best value was 2.0, the last one 2.5"
    )


def test_improvement_starts_the_count_again():
    assert outputs_until_stop([3, 4, 2, 4, 1, 4], patience=2) is None


def test_improvements_below_min_delta_do_not_count():
    assert outputs_until_stop([3, 2.9, 2.8], patience=2) is None
    assert outputs_until_stop([3, 2.9, 2.8], patience=2, min_delta=0.5)[0] == 3


def test_higher_values_are_better_on_request():
    assert outputs_until_stop([1, 2, 3], patience=1, higher_is_better=True) is None


def test_nan_is_no_improvement():
    assert outputs_until_stop([np.nan, np.nan], patience=2)[0] == 2


def test_takes_a_controller():
    reasons = []
    stopping = EarlyStopping(
        SimpleNamespace(request_stop=reasons.append), "loss", 1, higher_is_better=False
    )

    stopping({"loss": 1.0})
    stopping({"loss": 1.0})

    assert len(reasons) == 1


def test_a_later_run_gets_its_patience_back():
    reasons = []
    stopping = EarlyStopping(reasons.append, "loss", patience=2, higher_is_better=False)

    for _ in range(4):
        stopping({"loss": 1.0})
    assert len(reasons) == 1
    stopping({"loss": 1.0})

    assert len(reasons) == 2


def test_state_goes_through_a_checkpoint():
    reasons = []
    stopping = EarlyStopping(reasons.append, "loss", patience=2, higher_is_better=False)
    stopping({"loss": 1.0})
    stopping({"loss": 1.0})
    restored = EarlyStopping(reasons.append, "loss", patience=2, higher_is_better=False)

    restored.set_state(json.loads(json.dumps(stopping.get_state())))
    restored({"loss": 1.0})

    assert len(reasons) == 1
