"""Tests of telling the user's code from library code, by files."""

import collections
import functools
import importlib
import sys
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary._owners import (
    Owner,
    is_library_file,
    owner_of_class,
    owner_of_function,
    owner_of_module,
)
from armillary.state._code import Code
from armillary.state._lift import find_slots

PROGRAM = """
import armillary
import jax.numpy as jnp
import numpy as np


class Total:
    def __init__(self):
        self.value = jnp.zeros(3)

    def update(self, x):
        self.value = self.value + x.sum(0)


class Trainer(armillary.StandardTrainer):
    def __init__(self):
        rows = np.arange(24, dtype=np.float32).reshape(8, 3)
        super().__init__(armillary.data.from_arrays({"x": rows}, batch_size=4))
        self.total = Total()

    def train_step(self, iterator):
        self.total.update(next(iterator)["x"])


def scale(x):
    return x * RATE


RATE = 1.0
"""
# Names of a library that Armillary works with, and of modules of Python.
NAMES = ["datasets", "profile", "sched"]


def import_program(name: str, folder: Any, monkeypatch: Any) -> Any:
    package = folder / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "program.py").write_text(PROGRAM)
    for known in [each for each in sys.modules if each.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module(f"{name}.program")
    for made in (name, f"{name}.program"):
        monkeypatch.setitem(sys.modules, made, sys.modules[made])
    return module


def run_text(**names: Any) -> Any:
    exec(compile(PROGRAM, "program.py", "exec"), names)
    return types.SimpleNamespace(**names)


def check_training(program: Any) -> None:
    trainer = program.Trainer()
    trainer.train(1)
    trainer.train(1)
    np.testing.assert_array_equal(trainer.total.value, [84, 92, 100])
    checkpoint = armillary.Checkpoint(trainer=trainer)
    assert "trainer/total/value" in checkpoint.read_leaves()


@pytest.mark.parametrize("name", NAMES)
def test_a_package_of_the_user_may_have_the_name_of_a_library(
    name, tmp_path, monkeypatch
) -> None:
    check_training(import_program(name, tmp_path, monkeypatch))


@pytest.mark.parametrize("names", [{}, {"__name__": "code"}, {"__name__": "mine"}])
def test_a_program_that_exec_runs_trains(names) -> None:
    check_training(run_text(**names))


@pytest.mark.parametrize("file", ["<stdin>", "<ipython-input-1-8c2b>"])
def test_a_program_that_python_reads_from_a_pipe_trains(file, monkeypatch) -> None:
    module = types.ModuleType("piped")
    module.__file__ = file
    monkeypatch.setitem(sys.modules, "piped", module)
    exec(compile(PROGRAM, file, "exec"), vars(module))
    check_training(module)
    assert not is_library_file(file)


def test_functions_of_such_programs_are_read_again(tmp_path, monkeypatch) -> None:
    by_exec = run_text()
    imported = import_program("sched", tmp_path, monkeypatch)
    for names in (vars(imported), by_exec.scale.__globals__):
        fn = armillary.function(lambda x, names=names: names["scale"](x))
        scale = armillary.function(names["scale"])
        assert fn(jnp.ones(())) == scale(jnp.ones(())) == 1
        names["RATE"] = 3.0
        assert scale(jnp.ones(())) == 3


def test_a_partial_of_a_function_is_read_again() -> None:
    names = vars(run_text())
    scale = functools.partial(names["scale"])

    code = Code([lambda: scale], [])

    assert "RATE" in {lookup.path for lookup in code.lookups.values()}


def test_a_file_in_a_folder_with_the_name_of_a_library_is_the_users(tmp_path) -> None:
    for name in (*NAMES, "armillary", "jax", "keras"):
        assert not is_library_file(str(tmp_path / name / "__init__.py"))


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_an_installed_library_is_the_distribution_of_that_name(
    folder, tmp_path
) -> None:
    file = tmp_path / folder / "datasets" / "load.py"
    other = tmp_path / f"my_{folder}" / "datasets" / "load.py"
    for each in (file, other):
        each.parent.mkdir(parents=True)
        (each.parent.parent / "datasets-3.0.dist-info").mkdir()
    assert is_library_file(str(file))
    assert not is_library_file(str(other))


def test_an_installed_package_of_another_distribution_is_not_the_library(
    tmp_path,
) -> None:
    site = tmp_path / "site-packages"
    (site / "vision_project-1.0.dist-info").mkdir(parents=True)
    assert not is_library_file(str(site / "datasets" / "load.py"))
    # Without its folder, nothing is known.
    assert not is_library_file(str(tmp_path / "dist-packages" / "datasets" / "x.py"))


@pytest.mark.parametrize(
    "kind",
    [
        *(armillary.Controller, keras.Model, nnx.Linear, optax.EmaState),
        *(jax.Array, jax.sharding.NamedSharding, type(jax.tree.structure(0))),
        *(np.ndarray, np.random.Generator, threading.Thread, collections.OrderedDict),
        *(type({}.keys()), type(None), type(iter([])), type(threading.Lock())),
        types.FunctionType,
    ],
    ids=lambda kind: kind.__qualname__,
)
def test_classes_of_libraries_stay_known(kind) -> None:
    assert owner_of_class(kind) is Owner.LIBRARY


def test_functions_of_libraries_stay_known() -> None:
    assert owner_of_function(optax.adam) is Owner.LIBRARY
    assert owner_of_function(functools.wraps) is Owner.LIBRARY
    assert owner_of_function(pytest.main) is Owner.PACKAGE
    assert owner_of_function(check_training) is Owner.USER


def test_the_wrapper_that_a_library_makes_is_the_users() -> None:
    wrapped: Any = jax.checkpoint(check_training)
    assert isinstance(wrapped, types.FunctionType)
    assert wrapped.__globals__["__name__"].startswith("jax")
    assert owner_of_function(wrapped) is Owner.USER


def test_modules_without_a_file() -> None:
    assert owner_of_module(sys.modules["builtins"]) is Owner.LIBRARY
    assert owner_of_module(types.ModuleType("sched")) is Owner.USER
    inside = type(jax.tree.structure(0)).__module__
    assert owner_of_module(sys.modules[inside]) is Owner.LIBRARY


def test_a_class_that_names_another_module_is_the_users() -> None:
    names: dict[str, Any] = {}
    exec("class Plain:\n    pass\n\nclass dict(dict):\n    pass", names)
    assert names["Plain"].__module__ == names["dict"].__module__ == "builtins"
    held = {"plain": names["Plain"](), "items": names["dict"]()}
    for each in held.values():
        each.weight = jnp.ones(1)
    slots = find_slots(types.SimpleNamespace(**held))
    assert sorted(slot.path for slot in slots) == ["items/weight", "plain/weight"]
