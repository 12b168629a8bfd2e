"""Tests of what a checkpoint holds and how it is written back."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from armillary.checkpoint import Checkpoint
from armillary.errors import DatasetStateError


class Position:
    """Has a state that is not made of arrays, as a dataset has."""

    def __init__(self, state: Any = 0) -> None:
        self.state = state
        self.log: list[Any] = []

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.log.append(state)
        if state == "refused":
            raise DatasetStateError("This position does not fit.")
        self.state = state


class Delegate:
    """Answers to every name, as `nnx.Rngs` does."""

    def __init__(self) -> None:
        self.array = jnp.zeros(3)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: None


def test_paths_begin_with_the_keywords() -> None:
    checkpoint = Checkpoint(
        model=nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
        step=nnx.Variable(jnp.asarray(4)),
        params={"w": jnp.zeros(2), "inner": {"b": jnp.ones(1)}},
        trainer=SimpleNamespace(weights=(jnp.zeros(1), jnp.zeros(2))),
    )

    assert set(checkpoint.read_content().leaves) == {
        "model/kernel",
        "model/bias",
        "step",
        "params/w",
        "params/inner/b",
        "trainer/weights/0",
        "trainer/weights/1",
    }
    assert set(checkpoint.objects) == {"model", "step", "params", "trainer"}


def test_a_shared_place_is_saved_once_under_its_first_path() -> None:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    checkpoint = Checkpoint(model=model, trainer=SimpleNamespace(net=model))

    assert set(checkpoint.read_content().leaves) == {"model/kernel", "model/bias"}


def test_places_made_later_are_found_and_states_are_copies() -> None:
    holder, position = SimpleNamespace(first=jnp.zeros(1)), Position({"epoch": 1})
    checkpoint = Checkpoint(holder=holder, data=position)
    holder.second = jnp.zeros(1)
    content = checkpoint.read_content()
    position.state["epoch"] = 2

    assert set(content.leaves) == {"holder/first", "holder/second"}
    assert content.states == {"data": {"epoch": 1}}


def test_an_object_may_have_arrays_and_a_state() -> None:
    position = Position(3)
    position.array = jnp.ones(2)
    content = Checkpoint(both=position).read_content()

    assert set(content.leaves) == {"both/array"}
    assert content.states == {"both": 3}


def test_objects_that_answer_to_every_name_have_no_state() -> None:
    rngs = nnx.Rngs(0)

    checkpoint = Checkpoint(rngs=rngs, delegate=Delegate())

    assert checkpoint.states == {}
    assert "delegate/array" in checkpoint.read_content().leaves


def test_arrays_are_written_before_states() -> None:
    holder = SimpleNamespace(array=jnp.zeros(1))
    seen: list[float] = []

    class Watcher(Position):
        def set_state(self, state: Any) -> None:
            seen.append(float(holder.array[0]))

    checkpoint = Checkpoint(data=Watcher(), holder=holder)
    checkpoint.write_content({"holder/array": jnp.ones(1)}, {"data": 1})

    assert seen == [1.0]


def test_a_refused_state_puts_everything_back() -> None:
    holder = SimpleNamespace(array=jnp.zeros(1))
    first, second = Position("one"), Position("two")
    checkpoint = Checkpoint(holder=holder, first=first, second=second)
    before = holder.array

    with pytest.raises(DatasetStateError, match="does not fit"):
        checkpoint.write_content(
            {"holder/array": jnp.ones(1)}, {"first": 9, "second": "refused"}
        )

    assert holder.array is before
    assert (first.state, second.state) == ("one", "two")
    assert second.log == ["refused", "two"]
