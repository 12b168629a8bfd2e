"""Tests of the live line in a notebook, with a simulated kernel."""

import sys
from types import ModuleType, SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary.controller import _display, _notebook_line
from tests.patience import wait_until


class Handle:
    """Stands for the handle that `display` returns, which displays an output again."""

    def __init__(self, texts):
        self.texts = texts

    def update(self, data, *, raw):
        assert raw
        self.texts.append(data["text/plain"])


@pytest.fixture
def texts(monkeypatch):
    """Everything that a cell shows as its live line, in order."""
    texts = []

    def display(data, *, raw, display_id):
        assert raw
        assert display_id
        texts.append(data["text/plain"])
        return Handle(texts)

    module = ModuleType("IPython.display")
    module.display = display
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(_display, "has_notebook", lambda: True)
    monkeypatch.setattr(_display, "_REFRESH_SECONDS", 0.05)
    return texts


def train(make_batches, **options):
    def step(state, batch):
        return state + batch.mean(), {"loss": jnp.mean(batch)}

    trainer = armillary.StepTrainer(step, jnp.zeros(()), make_batches)
    controller = armillary.Controller(
        trainer=trainer, global_step=trainer.global_step, steps_per_loop=2, **options
    )
    controller.train(4)


def test_a_cell_shows_the_line_and_empties_it_at_the_end(texts):
    def is_shown():
        return any(text.startswith("step 0/4 (0%) | ") for text in texts)

    def make_batches():
        yield from np.ones((2, 8), "float32")
        wait_until(is_shown)
        yield from np.ones((2, 8), "float32")

    train(make_batches)
    assert is_shown()
    assert texts[0] == texts[-1] == ""


def test_without_progress_a_cell_shows_no_line(texts):
    train(lambda: iter(np.ones((4, 8), "float32")), progress=False)
    assert texts == []


def test_a_closed_line_shows_nothing_more(texts):
    line = _notebook_line.NotebookLine()
    line.show("step 1")
    line.close()
    line.show("step 2")
    assert texts == ["", "step 1", ""]


def test_the_line_is_for_kernels_whose_log_is_shown(monkeypatch, caplog):
    shell = SimpleNamespace(kernel=object())
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    caplog.set_level("INFO", "armillary")
    assert _notebook_line.has_notebook()
    caplog.set_level("WARNING", "armillary")
    assert not _notebook_line.has_notebook()

    caplog.set_level("INFO", "armillary")
    del shell.kernel
    assert not _notebook_line.has_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not _notebook_line.has_notebook()
