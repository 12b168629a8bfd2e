"""`import armillary`: light, silent and without side effects."""

import os
import subprocess
import sys

import pytest

import armillary
from tests.patience import patience
from tests.tiers import slow_after_first

OPTIONAL_PACKAGES = (
    "datasets",
    "equinox",
    "grain",
    "keras",
    "ray",
    "sklearn",
    "tensorboard",
    "tensorboardX",
    "tensorflow",
    "torch",
    "wandb",
)
# Imported where they are first used.
LATE_PACKAGES = ("flax", "optax", "orbax", "treescope")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=patience(120),
        env={**os.environ, **environment},
    )


IMPORT = """
import logging, sys, jax
before = dict(jax.config.values)
import armillary
others = {"estimator", "keras", "lora", "metrics"}
for name in set(armillary.__all__) - others:
    getattr(armillary, name)
after = jax.config.values
print({key for key in after if after[key] != before.get(key, after)})
own = logging.getLogger("armillary")
print(logging.getLogger().handlers, own.handlers, own.level)
print(*sys.modules)
"""


def test_import_is_silent_and_touches_nothing_else():
    # An error if a device is touched, as the next test shows.
    result = run_python(IMPORT, JAX_PLATFORMS="no_such_platform")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    changed_settings, log_handlers, modules = result.stdout.splitlines()
    assert changed_settings == "set()"
    assert log_handlers == "[] [] 0"
    loaded = {name.partition(".")[0] for name in modules.split()}
    assert loaded.isdisjoint((*OPTIONAL_PACKAGES, *LATE_PACKAGES))
    assert "armillary" in loaded


@pytest.mark.slow
def test_a_device_of_no_such_platform_cannot_be_touched():
    result = run_python("import jax; jax.devices()", JAX_PLATFORMS="no_such_platform")
    assert result.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "adds"),
    [("armillary; armillary.Controller", False), ("flax.nnx", True)],
    ids=["import", "control"],
)
def test_import_adds_nothing_but_itself_to_jax_and_flax(module, adds):
    result = run_python(
        "import sys, jax, flax\n"
        "before = set(sys.modules)\n"
        f"import {module}\n"
        "print(*(set(sys.modules) - before))"
    )
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    assert loaded, result.stderr
    others = loaded - {"armillary", "flax"} - set(sys.stdlib_module_names)
    assert bool(others) == adds, others


LATE = """
import sys, armillary

def loaded(*names):
    return [name for name in names if name in sys.modules]

assert {*armillary.__all__, "checkpoint", "__version__"} <= set(dir(armillary))
from armillary._cli import main
assert main(["launch", "-m", "this"]) == 0
print("launched", loaded("jax", "numpy"))
import jax.numpy as jnp, numpy as np
data = armillary.data.from_arrays({"x": np.ones(4)}, batch_size=1)

class Trainer(armillary.StandardTrainer):
    def __init__(self):
        super().__init__(data)
        self.total = jnp.zeros(())

    def train_step(self, iterator):
        self.total = self.total + next(iterator)["x"][0]

trainer = Trainer()
trainer.train(3)
print("trained", trainer.total, loaded("flax.nnx"))
print("metrics", armillary.metrics.AUC.__name__, loaded("flax.nnx"))
"""


HELP = """
import sys
from armillary._cli import main

words = {words}
try:
    main([*words, "--help"])
except SystemExit as error:
    assert not error.code
heavy = {{"jax", "numpy", "etils", "flax", "orbax", "rich", "tensorboardX"}}
print("loaded", sorted(heavy & set(sys.modules)))
"""


@slow_after_first(
    "command", ["", "runs", "launch", "new", "report", "goodput"], ids=str
)
def test_the_help_of_a_command_imports_no_jax(command):
    result = run_python(HELP.format(words=command.split()))
    assert result.returncode == 0, result.stderr
    assert f"usage: armillary {command}".strip() in result.stdout
    assert result.stdout.splitlines()[-1] == "loaded []"


@pytest.mark.parametrize("name", ["nothing", "a.b", "metrics.nothing", ""])
def test_a_name_that_does_not_exist_is_no_attribute(name):
    assert not hasattr(armillary, name)


def test_unused_modules_are_not_imported(tmp_path):
    # A class of a program in a string has no source, which hooks would be read from.
    program = tmp_path / "program.py"
    program.write_text(LATE)
    result = run_python(f"import runpy; runpy.run_path({str(program)!r})")
    lines = [line for line in result.stdout.splitlines() if line.endswith("]")]
    assert lines == [
        "launched []",
        "trained 3.0 []",
        "metrics AUC ['flax.nnx']",
    ], result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Checkpoint", "estimator", "parameter_server"])
def test_keras_may_be_imported_first(name):
    code = f"import keras, armillary\narmillary.{name}"
    pytest.importorskip("keras")
    result = run_python(code, KERAS_BACKEND="jax", PYTHONWARNINGS="default")
    assert result.returncode == 0, result.stderr
