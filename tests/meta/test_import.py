"""`import armillary`: light, silent and without side effects."""

import os
import subprocess
import sys

import pytest

import armillary

OPTIONAL_PACKAGES = (
    "datasets",
    "equinox",
    "grain",
    "keras",
    "mlflow",
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
        timeout=120,
        env={**os.environ, **environment},
    )


IMPORT = """
import logging, sys, jax
before = dict(jax.config.values)
import armillary
others = {"ExponentialMovingAverage", "estimator", "keras", "metrics"}
for name in set(armillary.__all__) - others:
    getattr(armillary, name)
after = jax.config.values
print({key for key in after if after[key] != before.get(key, after)})
own = logging.getLogger("armillary")
print(logging.getLogger().handlers, own.handlers, own.level)
print(*sys.modules)
"""


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_launcher_starts_without_jax_and_numpy():
    result = run_python(
        "import sys, armillary\n"
        "from armillary._cli import main\n"
        "assert main(['launch', '-m', 'this']) == 0\n"
        "print([name for name in ('jax', 'numpy') if name in sys.modules])\n"
        "armillary.Controller\n"
        "print([name for name in ('jax', 'numpy') if name in sys.modules])"
    )
    lines = result.stdout.splitlines()[-2:]
    assert lines == ["[]", "['jax', 'numpy']"], result.stdout + result.stderr


def test_names_are_listed_before_they_are_imported():
    result = run_python("import armillary\nprint(*dir(armillary))")
    assert {*armillary.__all__, "checkpoint", "__version__"} <= set(
        result.stdout.split()
    )


@pytest.mark.slow
def test_metrics_are_imported_when_they_are_first_used():
    result = run_python(
        "import sys, armillary\n"
        "before = 'flax' in sys.modules\n"
        "print(before, armillary.metrics.AUC.__name__, 'flax.nnx' in sys.modules)"
    )
    assert result.stdout == "False AUC True\n", result.stdout + result.stderr


@pytest.mark.slow
def test_a_program_without_nnx_never_loads_it():
    result = run_python(
        "import sys, jax, jax.numpy as jnp, numpy as np, armillary\n"
        "data = armillary.data.from_arrays({'x': np.ones(4)}, batch_size=1)\n"
        "class Trainer(armillary.StandardTrainer):\n"
        "    def __init__(self):\n"
        "        super().__init__(data)\n"
        "        self.total = jnp.zeros(())\n"
        "    def train_step(self, iterator):\n"
        "        self.total = self.total + next(iterator)['x'][0]\n"
        "trainer = Trainer()\n"
        "trainer.train(3)\n"
        "print(trainer.total, 'flax.nnx' in sys.modules)\n"
    )
    assert result.stdout == "3.0 False\n", result.stdout + result.stderr
