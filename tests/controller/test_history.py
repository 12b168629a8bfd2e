"""Tests of the history that `train` returns."""

import math
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

from tests.controller.loops import make_controller


def train(step):
    return {
        "loss": jnp.float32(1 / step),
        "half": {"a": jnp.bfloat16(0.5), "n": 3, "text": "x"},
        "counts": np.arange(3),
        **({"late": 7.0} if step == 4 else {}),
    }


@pytest.fixture
def controller():
    def evaluate(step):
        return {"accuracy": np.float32(step / 8), "nan": math.nan}

    return make_controller(train, evaluate, steps_per_loop=2)


def test_train_returns_the_scalars_of_its_loops(controller):
    history = controller.train(6)

    assert history.steps == [2, 4, 6]
    assert history["loss"] == pytest.approx([1 / 2, 1 / 4, 1 / 6])
    assert history["half/a"] == [0.5] * 3
    assert history["half/n"] == [3.0] * 3
    assert list(history) == ["loss", "half/a", "half/n", "late"]
    assert list(map(math.isnan, history["late"])) == [True, False, True]
    assert history.eval.steps == []
    assert len(history.eval) == 0
    with pytest.raises(KeyError, match="'los'"):
        history["los"]
    assert history.eval.get("accuracy") is None


def test_train_and_evaluate_returns_the_last_output_with_the_history(controller):
    output = controller.train_and_evaluate(8, eval_interval=4)

    assert output["accuracy"] == 1.0
    assert output.history.steps == [2, 4, 6, 8]
    assert output.history.eval.steps == [4, 8]
    assert output.history.eval["accuracy"] == [0.5, 1.0]
    shown = repr(output.history)
    assert shown == "History(4 records: loss, half/a, half/n, late)"


def test_the_output_is_the_dictionary_that_it_was(controller):
    output = controller.train_and_evaluate(2)
    del output["nan"]

    assert output == {"accuracy": 0.25}
    assert isinstance(output, dict)
    again = pickle.loads(pickle.dumps(output))
    assert again == output
    assert again.history["loss"] == [0.5]


def test_a_history_covers_one_call(controller):
    first = controller.train(4)
    controller.evaluate()
    second = controller.train(8)

    assert (first.steps, second.steps) == ([2, 4], [6, 8])
    assert len(first.eval.steps) == len(second.eval.steps) == 0
    nothing = controller.train(8)
    assert (nothing.steps, dict(nothing)) == ([], {})
    assert repr(nothing) == "History(0 records: no scalars)"


@pytest.mark.parametrize(
    ("output", "places"),
    [
        ({"a/b": 1.0, "a": {"b": 2.0}}, ["output['a/b']", "output['a']['b']"]),
        ({1: 1.0, "1": 2.0}, ["output[1]", "output['1']"]),
    ],
)
def test_two_values_of_one_name_are_refused(output, places):
    controller = make_controller(lambda _: output, steps_per_loop=2)

    with pytest.raises(ValueError, match="both called") as caught:
        controller.train(2)
    assert all(place in str(caught.value) for place in places)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("précision".encode().decode("ascii", "surrogateescape"), "LC_ALL=C.UTF-8"),
        ("précision".encode("latin-1").decode(errors="surrogateescape"), "not UTF-8"),
    ],
)
def test_a_name_that_no_file_can_hold_is_refused(name, fix):
    controller = make_controller(lambda _: {"a": {name: 1.0}}, steps_per_loop=2)

    with pytest.raises(ValueError, match=rf"under the name 'a/pr\\ud.*{fix}"):
        controller.train(2)


def test_keys_of_several_types_are_no_riddle():
    controller = make_controller(
        lambda _: {0: jnp.ones(()), "v": 2.0}, steps_per_loop=2
    )

    history = controller.train(2)

    assert dict(history) == {"0": [1.0], "v": [2.0]}
