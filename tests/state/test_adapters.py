"""Tests of adapters: a library of variables is one class, and one line to list it."""

import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from armillary.state import _adapters
from armillary.state._adapters import Adapter, adapter_of, is_variable, node_adapter
from armillary.state._holders import ATTRIBUTES
from armillary.state._lift import find_slots
from armillary.state._slots import Role, Slot


class Cell:
    """A variable of a small library of its own."""

    def __init__(self, value):
        self.held = jnp.asarray(value, jnp.float32)


class Board:
    """An object of the library, which holds variables."""

    def __init__(self):
        self.total = Cell(0.0)
        self.rate = Cell(0.5)


for kind in (Cell, Board):
    kind.__module__ = "abacus.core"


class CellSlot(Slot):
    def __init__(self, variable, path):
        super().__init__(variable, "held", path)
        self.variable = variable
        self.key = id(variable)


class AbacusAdapter(Adapter):
    name = "abacus"
    title = "Abacus"
    attributes = ATTRIBUTES

    def is_variable_type(self, kind):
        return issubclass(kind, Cell)

    def is_node_type(self, kind):
        return issubclass(kind, Board)

    def make_slot(self, variable, path):
        return CellSlot(variable, path)

    def parts_of_variable(self, variable):
        return []

    def read(self, variables):
        return [variable.held for variable in variables]

    def write(self, variables, values):
        for variable, value in zip(variables, values, strict=True):
            variable.held = value

    def roles_below(self, node, parts):
        return {id(node.total): Role.METRIC}


@pytest.fixture
def abacus(monkeypatch):
    home: object = types.SimpleNamespace(ADAPTER=AbacusAdapter())
    monkeypatch.setitem(sys.modules, "abacus", types.ModuleType("abacus"))
    monkeypatch.setitem(sys.modules, "abacus_adapter", home)
    monkeypatch.setitem(_adapters._MODULES, "abacus", "abacus_adapter")
    caches = [
        value for value in vars(_adapters).values() if hasattr(value, "cache_clear")
    ]
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("abacus")
def test_a_listed_library_is_found_with_its_roles():
    found = {slot.path: slot.role for slot in find_slots([Board()], "boards")}
    assert found == {"boards/0/rate": Role.PLAIN, "boards/0/total": Role.METRIC}


@pytest.mark.usefixtures("abacus")
def test_a_step_changes_the_variables_of_a_listed_library(run_lifted):
    board = Board()

    def step():
        board.total.held = board.total.held + board.rate.held

    run_lifted(step, board)
    assert not isinstance(board.total.held, jax.core.Tracer)
    np.testing.assert_array_equal(board.total.held, 0.5)
    np.testing.assert_array_equal(board.rate.held, 0.5)


def test_objects_of_an_unlisted_library_are_plain_objects():
    assert not is_variable(Cell(1.0))
    assert node_adapter(Board) is None


def test_an_object_of_two_libraries_counts_as_the_first(monkeypatch):
    adapters = {name: types.SimpleNamespace(ADAPTER=AbacusAdapter()) for name in "ab"}
    for name, home in adapters.items():
        monkeypatch.setitem(sys.modules, f"{name}_adapter", home)
    modules = {"abacus": "a_adapter", "beads": "b_adapter"}
    monkeypatch.setattr(_adapters, "_MODULES", modules)
    both = type("Both", (Cell,), {"__module__": "beads.core"})
    assert adapter_of(both(1.0)) is adapters["a"].ADAPTER


USE_KERAS = """
import os, sys
os.environ["KERAS_BACKEND"] = "jax"
import armillary
assert "keras" not in sys.modules
import keras
assert "armillary.keras" not in sys.modules
from armillary.state._lift import find_slots
layer = keras.layers.Dense(2)
layer.build((None, 3))
print(sorted(slot.path for slot in find_slots(layer, "layer")))
"""


@pytest.mark.slow
def test_variables_of_keras_are_found_without_importing_its_package():
    pytest.importorskip("keras")
    found = subprocess.run(
        [sys.executable, "-c", USE_KERAS], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "['layer/bias', 'layer/kernel']"
