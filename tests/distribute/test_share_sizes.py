"""Tests of warnings about state that counts the examples of one replica."""

import jax.numpy as jnp
import pytest

import armillary
from tests.distribute.share_steps import train


def counting_step(size_of):
    def step(state, batch):
        seen = state["seen"] + size_of(batch)
        return {"w": state["w"] * 1, "seen": seen}, {}

    return step


COUNTERS = {
    "examples": (lambda batch: batch["x"].shape[0], 4),
    "values": (lambda batch: batch["x"].size, 12),
}


@pytest.mark.parametrize("kind", COUNTERS)
def test_a_counter_of_one_share_is_found(kind, caplog):
    size_of, size = COUNTERS[kind]
    start = {"w": jnp.ones(3), "seen": 0}

    state, _ = train(counting_step(size_of), 4, start)

    assert state["seen"] == 3 * size
    [message] = caplog.messages
    assert "`state['seen']`" in message
    assert f"grows by {size}" in message
    assert "1 of 4 examples" in message
    assert 'armillary.all_reduce("sum", size)' in message


def test_the_place_in_a_ring_is_a_counter(caplog):
    def step(state, batch):
        after = (state["seen"] + batch["x"].shape[0]) % 64
        return {"w": state["w"] * 1, "seen": after}, {}

    state, _ = train(step, 4, {"w": jnp.ones(3), "seen": 0})

    assert state["seen"] == 12
    [message] = caplog.messages
    assert "grows by 4" in message


@pytest.mark.parametrize("num_devices", [1, 4])
def test_the_line_of_the_message_counts_all_examples(num_devices, caplog):
    step = counting_step(lambda batch: armillary.all_reduce("sum", len(batch["x"])))

    state, _ = train(step, num_devices, {"w": jnp.ones(3), "seen": 0})

    assert state["seen"] == 48
    assert caplog.messages == []


def test_a_counter_of_steps_is_fine(caplog):
    state, _ = train(counting_step(lambda _: 1), 4, {"w": jnp.ones(3), "seen": 0})

    assert state["seen"] == 3
    assert caplog.messages == []
