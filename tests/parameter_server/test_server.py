"""Tests that a parameter server applies each update once, in order."""

import numpy as np
import pytest

from armillary.parameter_server._server import (
    ArrayType,
    ParameterServer,
    Push,
    fetch_values,
)

TYPE = ArrayType((2,), np.dtype("float32"))
PART = (0, 0)


@pytest.fixture
def server():
    server = ParameterServer()
    server.put({0: TYPE}, {PART: np.zeros(2, "float32")})
    return server


def push(call, value, *, version=0, oldest=0):
    change = np.full(2, value, "float32")
    return Push(call, oldest, version, {}, {PART: change})


def read(server):
    version, (value,) = fetch_values(server.read((PART,)))
    return version, value.tolist()


def test_a_call_that_arrives_twice_is_applied_once(server):
    assert server.push(push(7, 1.0)) == 0
    assert server.push(push(7, 100.0)) == 0
    assert read(server) == (1, [1.0, 1.0])


def test_calls_that_ended_are_forgotten_and_others_not(server):
    for call in range(5):
        server.push(push(call, 1.0, oldest=call))
    server.push(push(4, 1.0, oldest=4))
    assert list(server._applied) == [4]
    assert read(server)[0] == 5


def test_values_that_were_read_do_not_change_later(server):
    _, (before,) = fetch_values(server.read((PART,)))
    server.push(push(0, 1.0))
    assert before.tolist() == [0, 0]
