import json
import random

import numpy as np
import pytest

from armillary.data.feed._stream import Position, decode_position, encode_position
from armillary.errors import DatasetStateError


def round_trip(source):
    state = encode_position(Position(2, source, 8, True), "arrays")
    return decode_position(json.loads(json.dumps(state)), "arrays")


def test_position_survives_json():
    assert round_trip({"index": 3}) == Position(2, {"index": 3}, 8, True)


def test_states_of_many_types_survive_json():
    state = {"a": b"\x00\xff", "b": [1.5, None, {"c": "d"}], "e": np.int64(2**40)}
    assert round_trip(state).source == {**state, "e": 2**40}
    array = round_trip({"words": np.arange(3, dtype=np.uint32)}).source["words"]
    assert array.dtype == np.uint32
    assert array.tolist() == [0, 1, 2]


def test_tuples_stay_tuples():
    # As `random.setstate` wants them.
    state = {"rng": random.Random(0).getstate(), "list": [(1, [2]), ()]}
    assert round_trip(state).source == state


def test_states_that_json_cannot_hold_are_errors():
    for state in [object(), {1: 2}, {"a": {3}}]:
        with pytest.raises(DatasetStateError, match="made of what JSON can hold"):
            encode_position(Position(source=state), "arrays")


def test_another_kind_shows_both_sides():
    state = encode_position(Position(), "grain.MapDataset")
    with pytest.raises(DatasetStateError, match=r"grain\.MapDataset, and not arrays"):
        decode_position(state, "arrays")
