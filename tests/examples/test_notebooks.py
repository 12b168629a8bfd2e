"""The notebooks, and training that is interrupted, in a real Jupyter kernel.

They need `nbclient` and `ipykernel`. Without them, the tests are skipped.
"""

import asyncio
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.environment import forget_devices
from tests.examples.loading import EXAMPLES
from tests.patience import patience

REASON = "Notebooks run only with `pip install ipykernel nbclient`."
pytest.importorskip("ipykernel", reason=REASON)
nbclient = pytest.importorskip("nbclient", reason=REASON)
nbformat = pytest.importorskip("nbformat", reason=REASON)
pytestmark = pytest.mark.slow

NOTEBOOKS = EXAMPLES / "notebooks"
SLOW_DATA = """
import time
import armillary, jax.numpy as jnp, numpy as np

def step(state, batch):
    return state + batch.sum(), {"mean": batch}

def make_batches():
    while True:
        time.sleep(0.01)
        yield np.ones(4, "float32")

trainer = armillary.StepTrainer(step, jnp.zeros(()), make_batches)
controller = armillary.Controller(
    trainer=trainer, global_step=trainer.global_step, steps_per_loop=20
)
"""
CONTINUE = """
start = int(trainer.global_step[...])
controller.train(start + 40)
print("from", start, "to", int(trainer.global_step[...]), "sum", float(trainer.state))
"""


@pytest.fixture
def kernel_environment(monkeypatch):
    """Lets a kernel choose its devices, and find Armillary."""
    for name, value in forget_devices().items():
        monkeypatch.setenv(name, value)
    paths = [str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def make_client(notebook: Any, **options: Any) -> Any:
    """Returns a client whose kernel runs the Python of the tests."""
    client = nbclient.NotebookClient(notebook, timeout=int(patience(240)), **options)
    client.create_kernel_manager()
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client.km.kernel_spec.argv[:] = command
    return client


def read_shape(cell: Any) -> list[str]:
    """Returns the lines that a cell shows, without their numbers."""
    streams: dict[str, str] = {}
    for output in cell.outputs:
        if output.output_type == "stream":
            streams[output.name] = streams.get(output.name, "") + output.text
    text = "".join(streams[name] for name in sorted(streams))
    text = re.sub(r"[-+]?\d[\d.,]*(e[-+]\d+)?|\.\.\.", "#", text)
    return [re.sub(r"\s+", " ", line) for line in text.splitlines()]


@pytest.mark.parametrize(
    "path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda p: p.name
)
def test_a_notebook_runs_and_shows_what_is_stored(path: Path, kernel_environment):
    stored = nbformat.read(path, as_version=4)
    fresh = nbformat.read(path, as_version=4)
    make_client(fresh).execute()
    cells = [cell for cell in stored.cells if cell.cell_type == "code"]
    found = [cell for cell in fresh.cells if cell.cell_type == "code"]
    assert sum(bool(cell.outputs) for cell in cells) > 2
    for old, new in zip(cells, found, strict=True):
        assert read_shape(new) == read_shape(old), old.source


async def run_until(
    client: Any, number: int, is_reached: Callable[[str, set[str]], bool]
) -> None:
    """Runs a cell, and interrupts it.

    Args:
        client: The client of a kernel.
        number: The number of the cell.
        is_reached: Gets the text of the cell, and the texts of its live line so far.
            Returns whether to interrupt it.
    """
    cell = client.nb.cells[number]
    task = asyncio.create_task(client.async_execute_cell(cell, number))
    lines: set[str] = set()
    while not task.done():
        text = "".join(output.get("text", "") for output in cell.outputs)
        lines |= {
            output.data["text/plain"]
            for output in cell.outputs
            if output.output_type == "display_data"
        }
        if is_reached(text, lines):
            await client.km.interrupt_kernel()
            break
        await asyncio.sleep(0.05)
    await task


def test_an_interrupt_ends_a_cell_and_the_next_cell_continues(kernel_environment):
    sources = [SLOW_DATA, "controller.train(10**6)", CONTINUE]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    client = make_client(nbformat.v4.new_notebook(cells=cells), allow_errors=True)

    def has_live_line(text: str, lines: set[str]) -> bool:
        shows_steps = any(
            re.match(r"step [1-9]\d*/1000000 \(0%\)", line) for line in lines
        )
        return shows_steps and "step:     60 |" in text

    async def run_cells() -> None:
        async with client.async_setup_kernel():
            await client.async_execute_cell(cells[0], 0)
            await run_until(client, 1, has_live_line)
            await client.async_execute_cell(cells[2], 2)

    asyncio.run(run_cells())
    assert cells[0].outputs == []
    *outputs, error = cells[1].outputs
    assert error.ename == "KeyboardInterrupt"
    displayed = [output for output in outputs if output.output_type == "display_data"]
    assert [output.data["text/plain"] for output in displayed] == [""]

    text = "".join(output.get("text", "") for output in cells[2].outputs)
    found = re.search(r"from (\d+) to (\d+) sum ([\d.]+)", text)
    assert found is not None, cells[2].outputs
    start, end, total = map(float, found.groups())
    assert start >= 60
    assert end == start + 40
    assert total == 4 * end
