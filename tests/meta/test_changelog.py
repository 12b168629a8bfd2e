"""Tests that the changelog is short, and announces only what exists."""

import ast
import importlib
import inspect
import operator
import pkgutil
import re
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import armillary
from armillary import _cli
from tests.meta.test_docs import REPOSITORY
from tests.meta.test_public_names import MODULES

TEXT = (REPOSITORY / "CHANGELOG.md").read_text()
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
NAMES = re.compile(r"[a-zA-Z_][\w.]*")
# The part that describes 0.3 and later. 0.1 has names of its own.
RECENT = TEXT.partition("\n## [0.1.0]")[0]
MAX_LINES = 120
OPTIONAL = ("equinox", "jax", "optax")
# Names that went, which the changelog lists with the line to write instead.
GONE = {"summary.NoopSummaryManager"}
# Names of JAX, of model libraries and schedulers, of files, and of the user.
OTHERS = {
    "BatchNorm",
    "DynamicScale",
    "TF_CONFIG",
    "argsort",
    "custom_vjp",
    "fit",
    "loops",
    "metrics.jsonl",
    "model_fn",
    "ps",
    "state_dict",
    "stateless_call",
    "use_ema",
}


def import_public() -> dict[str, Any]:
    """Returns the public modules and all that they offer, by short and full names."""
    found: dict[str, Any] = {"armillary": armillary}
    for name in ["armillary", *(module.name for module in MODULES)]:
        module = importlib.import_module(name)
        found[name.removeprefix("armillary.")] = module
        for short in getattr(module, "__all__", []):
            found[short] = getattr(module, short)
    return found


PUBLIC = import_public()
# An object of a program, under the name that the changelog gives it.
INSTANCES = {"strategy": armillary.MirroredStrategy}


def list_arguments(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except ValueError:  # Some types have no signature.
        return set()


def find_value(name: str) -> Any:
    """Returns the object that a name means to a user of the library, or `None`."""
    first, _, rest = name.partition(".")
    try:
        if first in OPTIONAL:
            return pkgutil.resolve_name(name)
        if first == "nnx":
            return pkgutil.resolve_name(f"flax.{name}")
        root = INSTANCES.get(first) or PUBLIC[first]
        return operator.attrgetter(rest)(root) if rest else root
    except (AttributeError, ImportError, KeyError):
        return None


def list_code(text: str) -> Iterator[str]:
    yield from re.findall(r"`([^`]+)`", text)


def find_faults(text: str) -> list[str]:
    """Returns names, arguments and commands of a text that do not exist."""
    makefile = (REPOSITORY / "Makefile").read_text()
    functions = filter(callable, PUBLIC.values())
    known = OTHERS.union(_cli._COMMANDS, *map(list_arguments, functions))
    faults = []
    for code in list_code(text):
        command, _, word = code.partition(" ")
        if code in GONE:
            continue
        if command == "make":
            exists = re.search(rf"^{word}:", makefile, re.M)
        elif command == "armillary" and word:
            exists = word in _cli._COMMANDS
        else:
            exists = is_known(code, known)
        if not exists:
            faults.append(code)
    return faults


def is_known(code: str, known: set[str]) -> bool:
    """Returns whether names and arguments in Python code exist; other text is fine."""
    argument = re.fullmatch(r"(\w+)=.+", code)
    if argument and "(" not in code:
        return argument[1] in known or "[" in code
    try:
        tree = ast.parse(code.rpartition(" = ")[2], mode="eval").body
    except SyntaxError:  # A path, or a line of a shell.
        return True
    if isinstance(tree, ast.Call):
        name = ast.unparse(tree.func)
        if not NAMES.fullmatch(name):  # Such as `super().method()`.
            return True
        keywords = {each.arg for each in tree.keywords}
        function = find_value(name)
        return callable(function) and keywords <= list_arguments(function)
    if not isinstance(tree, ast.Name | ast.Attribute) or code in known:
        return True
    if find_value(code) is not None:
        return True
    is_alone = "." not in code
    return is_alone and any(hasattr(value, code) for value in PUBLIC.values())


def test_names_in_the_changelog_exist():
    assert len(list(list_code(RECENT))) > 80
    assert find_faults(RECENT) == []


@pytest.mark.parametrize(
    "text",
    [
        "`armillary.summary.MlflowWriter`",
        "`MlflowWriter`",
        "`ShardedStrategy.split_to_logical_devices`",
        "`StepTrainer(no_such_argument=...)`",
        "`NoSuchTrainer(step, state)`",
        "`strategy.no_such_method`",
        "`no_such_argument=True`",
        "`make quick-tests`",
        "`armillary dance`",
        "`optax.no_such_optimizer`",
    ],
)
def test_a_name_that_does_not_exist_is_found(text):
    assert find_faults(text) == [text.strip("`")]


def test_names_that_the_changelog_calls_gone_are_gone():
    assert set(list_code(RECENT)) >= GONE
    assert find_value("summary.NoopSummaryManager") is None


def test_the_changelog_has_the_version_of_the_package_first():
    next_version = re.search(r"^## \[Unreleased\], to be (.+)$", TEXT, re.M)
    versions = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", TEXT, re.M)
    expected = f"{next_version[1]}.dev0" if next_version else versions[0]
    assert expected == armillary.__version__ == PROJECT["version"]
    assert versions == sorted(versions, key=lambda each: each.split("."), reverse=True)


def test_each_release_in_the_changelog_has_a_date():
    titles = re.findall(r"^## (.+)$", TEXT, re.M)
    released = [title for title in titles if not title.startswith("[Unreleased]")]
    for title in released:
        rule = r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}(, tag `v(.+)`)?"
        match = re.fullmatch(rule, title)
        assert match, title
        assert match[3] in (None, match[1])


def test_the_recent_part_of_the_changelog_is_short():
    lines = RECENT.partition("\n## ")[2].splitlines()
    assert len(lines) <= MAX_LINES, "Move details to docs/reference/upgrading.md."
