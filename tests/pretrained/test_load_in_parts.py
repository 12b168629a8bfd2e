"""A model is loaded in parts where memory has no room for old and new arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from armillary import pretrained
from armillary.checkpoint import _room
from armillary.errors import CheckpointMismatchError
from armillary.pretrained import _load

NUM_ARRAYS = 16
SHAPE = (32, 32)
NAMES = pretrained.Names([(f"old.{i}", f"layer_{i}") for i in range(NUM_ARRAYS)])


def make_tensors():
    return {f"old.{i}": np.full(SHAPE, i, np.float32) for i in range(NUM_ARRAYS)}


def measure_live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture
def live_bytes(monkeypatch):
    """Lets memory be too small; returns the bytes of all arrays before each read."""
    found = []
    original = _load._read

    def read(view, leaf):
        found.append(measure_live_bytes())
        return original(view, leaf)

    monkeypatch.setattr(_room, "has_room", lambda leaves, specs: False)
    monkeypatch.setattr(_load, "_read", read)
    return found


def test_old_arrays_leave_memory_while_new_ones_come(live_bytes):
    before = measure_live_bytes()
    model = {f"layer_{i}": jnp.zeros(SHAPE) for i in range(NUM_ARRAYS)}
    size = measure_live_bytes() - before

    report = pretrained.load(model, make_tensors(), NAMES)

    assert len(live_bytes) == len(report.restored) == NUM_ARRAYS
    assert max(live_bytes) - before <= 1.2 * size
    for i in range(NUM_ARRAYS):
        np.testing.assert_array_equal(model[f"layer_{i}"], np.full(SHAPE, i))


def test_an_error_in_between_deletes_what_was_replaced(live_bytes, monkeypatch):
    model = {f"layer_{i}": jnp.zeros(SHAPE) for i in range(NUM_ARRAYS)}
    original = _load._read

    def fail(view, leaf):
        if len(live_bytes) == 5:
            raise OSError("the network is gone")
        return original(view, leaf)

    monkeypatch.setattr(_load, "_read", fail)
    with pytest.raises(OSError, match="the network is gone") as caught:
        pretrained.load(model, make_tensors(), NAMES)

    assert "4 arrays" in caught.value.__notes__[0]
    assert "deleted" in caught.value.__notes__[0]
    deleted = [name for name, array in model.items() if array.is_deleted()]
    assert deleted == [f"layer_{i}" for i in range(4)]


def test_a_value_that_does_not_fit_in_a_later_part_does_not_say_nothing_was_loaded(
    live_bytes,
):
    model = {f"layer_{i}": jnp.zeros(SHAPE, jnp.float16) for i in range(NUM_ARRAYS)}
    tensors = make_tensors()
    tensors["old.9"][0, 0] = 1e30
    with pytest.raises(CheckpointMismatchError, match="`layer_9` cannot be") as caught:
        pretrained.load(model, tensors, NAMES, cast=True)

    assert "Nothing was loaded" not in str(caught.value)
    assert "deleted" in caught.value.__notes__[0]
