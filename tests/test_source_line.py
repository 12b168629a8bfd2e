"""Tests of the line of a program that a message names."""

import sys
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp

from armillary._jaxpr import source_line


def add_one(x):
    return x + 1


def find_line():
    [equation] = jax.make_jaxpr(add_one)(jnp.ones(2)).eqns
    return source_line(equation)


def run_with_shell(monkeypatch, format_code_name):
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=format_code_name))
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return find_line()


def test_a_line_has_its_file_number_and_function():
    number = add_one.__code__.co_firstlineno + 1
    assert find_line() == f"{__file__}:{number} (add_one)"


def test_a_line_of_a_notebook_has_the_number_of_its_cell(monkeypatch):
    number = add_one.__code__.co_firstlineno + 1
    cells = {__file__: ("Cell", "In[3]")}
    line = run_with_shell(monkeypatch, cells.get)
    assert line == f"Cell In[3]:{number} (add_one)"


def test_a_line_of_a_file_that_a_notebook_imports_has_the_file(monkeypatch):
    assert run_with_shell(monkeypatch, {}.get) == find_line()
    monkeypatch.delitem(sys.modules, "IPython")
    assert find_line().startswith(f"{__file__}:")
