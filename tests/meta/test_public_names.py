"""Tests that each package lists exactly the names it offers, in order."""

import ast
import importlib
import inspect
import itertools
import operator
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import armillary
from armillary.advice._foreign_names import HOMES, NAMES, find_module_answer
from tests.patience import patience

# Modules under the names of TensorFlow and Orbit, for names that are elsewhere, too.
ALIASES = (
    "armillary.distribute.cluster_resolver",
    "armillary.distribute.experimental",
    "armillary.utils",
)
MODULES = [
    module
    for module in pkgutil.walk_packages(armillary.__path__, prefix="armillary.")
    if "._" not in module.name
]
PACKAGES = ["armillary", *(module.name for module in MODULES if module.ispkg)]


def list_public_names(module: ModuleType) -> list[str]:
    """Returns the names that `module` binds, without its imports from elsewhere.

    If only a type checker imports a name, the module imports it on first use.
    """
    names: set[str] = set()
    nodes = ast.parse(inspect.getsource(module)).body
    late = [node.body for node in nodes if isinstance(node, ast.If)]
    for node in itertools.chain(nodes, *late):
        if isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] == "armillary":
                names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
    return sorted(name for name in names if not name.startswith("_"))


@pytest.mark.parametrize("name", PACKAGES)
def test_all_lists_the_public_names_in_order(name):
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", [])
    assert listed == sorted(listed)
    assert listed == list_public_names(module)


def test_a_late_name_is_what_a_type_checker_takes_it_for():
    [block] = [
        node.body
        for node in ast.parse(inspect.getsource(armillary)).body
        if isinstance(node, ast.If)
    ]
    for node in block:
        assert isinstance(node, ast.ImportFrom)
        if node.module != "armillary":
            home = importlib.import_module(node.module)
            for alias in node.names:
                assert getattr(armillary, alias.name) is vars(home)[alias.name]


def test_a_name_that_another_package_has_is_answered_with_its_place():
    for name, home in HOMES.items():
        assert hasattr(importlib.import_module(home), name), (name, home)
        assert find_module_answer("armillary.launch", name) == f"Write `{home}.{name}`."
    with pytest.raises(AttributeError, match=r"Write `armillary\.data\.from_arrays`"):
        _ = armillary.from_arrays


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("LightningModule", "Derive from `armillary.StandardTrainer`, "),
        ("LightningDataModule", "`armillary.data.from_arrays(arrays, batch_size=...)`"),
        ("Trainer", "`armillary.Controller(trainer=trainer, ...)`"),
        ("ModelCheckpoint", "`armillary.CheckpointManager(checkpoint, directory, "),
        ("Callback", "`armillary.actions.EarlyStopping(...)`"),
        ("callbacks", "`armillary.actions.EarlyStopping(...)`"),
        ("seed_everything", "`nnx.Rngs(0)`"),
    ],
)
def test_a_name_of_lightning_is_answered_with_the_line_to_write(name, answer):
    for package in (armillary, armillary.actions):
        with pytest.raises(AttributeError) as caught:
            getattr(package, name)
        assert answer in str(caught.value)


def test_a_name_that_is_answered_is_not_there():
    packages = [importlib.import_module(name) for name in [*PACKAGES, *ALIASES]]
    owners = {each.__name__.rpartition(".")[2]: each for each in packages}
    for key in NAMES:
        owner, _, name = key.rpartition(".")
        if not owner:
            assert not hasattr(armillary, name), key
        elif owner in owners:
            assert not hasattr(owners[owner], name), key


def test_an_answer_names_only_what_exists():
    names = {
        name
        for answer in NAMES.values()
        for name in re.findall(r"`(?:with )?(armillary(?:\.\w+)+)", answer)
    }
    assert len(names) > 30
    for name in names:
        operator.attrgetter(name.partition(".")[2])(armillary)


@pytest.mark.parametrize("name", ["armillary", *(module.name for module in MODULES)])
def test_public_objects_are_documented(name):
    module = importlib.import_module(name)
    assert module.__doc__
    objects = {key: getattr(module, key) for key in list_public_names(module)}
    undocumented = [
        key
        for key, value in objects.items()
        if (inspect.isclass(value) or inspect.isroutine(value)) and not value.__doc__
    ]
    assert not undocumented


@pytest.mark.slow
def test_names_in_docstrings_can_be_reached_from_the_package():
    folder = Path(armillary.__file__).parent
    text = "\n".join(path.read_text() for path in folder.rglob("*.py"))
    names = sorted(set(re.findall(r"`(armillary(?:\.[a-z]\w*)*\.[A-Z]\w*)", text)))
    assert names
    code = f"import armillary, operator\nfor name in {names}:\n"
    code += "    operator.attrgetter(name.partition('.')[2])(armillary)\n"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert ended.returncode == 0, ended.stderr
