"""Every private name of other libraries has a row in docs/internals/private_apis.md."""

import ast
import re
from collections import defaultdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "internals" / "private_apis.md"
PRIVATE_MODULES = ("jax._src", "jaxlib", "ctypes")
# Public, although they begin with an underscore.
DOCUMENTED = {"_asdict", "_exit", "_fields", "_replace"}
OWN = {"self", "cls", "other"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def find_imports(tree: ast.Module) -> set[str]:
    """Returns what a file imports of private modules, in full."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith(PRIVATE_MODULES)}


def find_definitions(tree: ast.Module) -> set[str]:
    """Returns private names that a file defines on its own objects."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in OWN
        ):
            names.add(node.attr)
    return names


def find_attributes(tree: ast.Module) -> set[str]:
    """Returns the private attributes that a file takes from other objects."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr)
        if not (isinstance(node.value, ast.Name) and node.value.id in OWN)
    }


def read_rows() -> dict[str, str]:
    """Returns for each file that the page names the text of its rows."""
    rows: dict[str, str] = defaultdict(str)
    for line in PAGE.read_text().splitlines():
        for file in re.findall(r"\]\(\.\./\.\./(armillary/[^)]+)\)", line):
            rows[file] += line.split(" | ")[0]
    return rows


def parse() -> dict[str, ast.Module]:
    return {
        path.relative_to(REPOSITORY).as_posix(): ast.parse(path.read_text())
        for path in sorted((REPOSITORY / "armillary").rglob("*.py"))
    }


def test_every_private_name_is_on_the_page():
    trees, rows = parse(), read_rows()
    own = set().union(*map(find_definitions, trees.values())) | DOCUMENTED
    missing = []
    for file, tree in trees.items():
        used = {name.rpartition(".")[2] for name in find_imports(tree)}
        used |= find_attributes(tree) - own
        missing += [(file, name) for name in sorted(used) if name not in rows[file]]
    assert missing == []


def test_every_name_on_the_page_is_used():
    for file, text in read_rows().items():
        source = (REPOSITORY / file).read_text()
        names = {
            part
            for name in re.findall(r"`([^`]+)`", text)
            for part in [name.removeprefix("jax.").rpartition(".")[2] or name]
        }
        unused = [name for name in sorted(names) if name not in source]
        assert not unused, f"{file} has none of {unused}: remove them from the page."


def test_every_row_has_a_test():
    lines = PAGE.read_text().splitlines()
    rows = [line for line in lines if "](../../armillary/" in line]
    assert rows
    assert [row for row in rows if "](../../tests/" not in row.split(" | ")[-1]] == []
