"""Tests that every documented exception is asserted, and has a row in the docs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from armillary import errors

REPOSITORY = Path(__file__).resolve().parents[2]
RAISES = re.compile(r"^ *Raises:\n(?P<entries>(?: {2,}.*\n?|\n(?= ))+)", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\w+):", re.MULTILINE)
DOCUMENTED = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def parse(folder: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        yield path.relative_to(REPOSITORY), ast.parse(path.read_text())


def find_announced(node: ast.AST, owner: str) -> Iterator[tuple[str, str]]:
    """Yields the public names below `node` with each exception they announce."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, DOCUMENTED) or child.name.startswith("_"):
            continue
        name = f"{owner}.{child.name}"
        section = RAISES.search((ast.get_docstring(child) or "") + "\n")
        if section is not None:
            for exception in ENTRY.findall(section["entries"]):
                yield name, exception
        if isinstance(child, ast.ClassDef):
            yield from find_announced(child, name)


def find_asserted() -> set[str]:
    """Returns the last part of every exception name given to `pytest.raises`."""
    names: set[str] = set()
    for _, tree in parse("tests"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises":
                names |= {
                    part.rpartition(".")[2]
                    for part in re.findall(r"[\w.]+", ast.unparse(node.args[0]))
                }
    return names


def test_announced_exceptions_are_asserted():
    announced = [
        (f"{path}: {name}", exception)
        for path, tree in parse("armillary")
        for name, exception in find_announced(tree, path.stem)
    ]
    assert announced, "No docstring announces an exception: the search is broken."
    asserted = find_asserted()
    assert [entry for entry in announced if entry[1] not in asserted] == []


def list_errors() -> set[str]:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    own = {each.__name__ for each in classes if each.__module__ == errors.__name__}
    return own - {"ArmillaryError"}


def test_every_error_is_asserted():
    assert list_errors() - find_asserted() == set()


def test_every_error_has_a_row_in_the_docs():
    page = (REPOSITORY / "docs" / "train" / "errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| \S", page, re.MULTILINE)
    assert sorted(rows) == sorted(list_errors())


def find_unannounced(node: ast.AST, owner: str) -> Iterator[str]:
    """Yields what public functions and methods raise, but do not announce."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from find_unannounced(child, f"{owner}.{child.name}")
        elif isinstance(child, DOCUMENTED) and not child.name.startswith("_"):
            docstring = ast.get_docstring(child) or ""
            inner = [n for n in ast.walk(child) if isinstance(n, ast.FunctionDef)]
            nested = {id(n) for f in inner[1:] for n in ast.walk(f)}
            for raised in ast.walk(child):
                call = getattr(raised, "exc", None)
                if id(raised) in nested or not isinstance(call, ast.Call):
                    continue
                name = ast.unparse(call.func).rpartition(".")[2]
                if name[0].isupper() and f"{name}:" not in docstring:
                    yield f"{owner}.{child.name}: {name}"


def test_public_functions_announce_what_they_raise():
    trees = list(parse("armillary"))
    public = {
        f"{node.module}.{alias.name}"
        for path, tree in trees
        if path.name == "__init__.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname in (None, alias.name)
    }
    found = [
        line
        for path, tree in trees
        for node in tree.body
        if isinstance(node, DOCUMENTED)
        and ".".join((*path.with_suffix("").parts, node.name)) in public
        for line in find_unannounced(ast.Module([node], []), str(path))
    ]
    assert len(public) > 100 and found == []
