"""Writes the pages of the reference: one for each public module, by its docstrings.

An object that several modules offer is described once, where users import it from; the
other pages refer to it. Nothing here needs Sphinx: the pages are text for `autodoc`.
"""

import ast
import functools
import importlib
import inspect
import itertools
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import armillary
import armillary.typing


class Entry(NamedTuple):
    """A public name of a module, where it is described, and in which words."""

    name: str
    home: str
    value: Any
    first_line: str


def list_modules() -> list[str]:
    """Returns the names of the public modules that offer something."""
    walked = pkgutil.walk_packages(armillary.__path__, prefix="armillary.")
    names = ["armillary", *(found.name for found in walked if "._" not in found.name)]
    return [name for name in names if list_names(importlib.import_module(name))]


def list_names(module: ModuleType) -> list[str]:
    """Returns what a module offers: its `__all__`, or what it defines itself."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    classes = inspect.getmembers(module, inspect.isclass)
    defined = [name for name, value in classes if value.__module__ == module.__name__]
    return [*defined, *read_alias_docs(module)]


def read_alias_docs(module: ModuleType) -> dict[str, str]:
    """Returns the strings below the type aliases of a module, by the alias."""
    body = ast.parse(inspect.getsource(module)).body
    return {
        ast.unparse(node.target): ast.literal_eval(after.value)
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr)
    }


def list_entries() -> dict[str, list[Entry]]:
    """Returns what each public module offers; the first to offer an object has it."""
    aliases = read_alias_docs(armillary.typing)
    homes: dict[int, str] = {}
    entries: dict[str, list[Entry]] = {}
    for module_name in list_modules():
        module = importlib.import_module(module_name)
        entries[module_name] = []
        for name in list_names(module):
            value, full_name = getattr(module, name), f"{module_name}.{name}"
            if inspect.ismodule(value):
                home, doc = value.__name__, value.__doc__
            elif inspect.isclass(value) or inspect.isroutine(value):
                home, doc = homes.setdefault(id(value), full_name), value.__doc__
            else:
                home, doc = f"armillary.typing.{name}", aliases[name]
            first_line = inspect.cleandoc(doc or "").partition("\n")[0]
            entries[module_name].append(Entry(full_name, home, value, first_line))
    return entries


@functools.cache
def find_described() -> set[type]:
    """Returns the classes that have a place of their own on some page."""
    entries = itertools.chain.from_iterable(list_entries().values())
    return {entry.value for entry in entries if is_class(entry)}


def make_pages() -> dict[str, str]:
    """Returns a page for each public module, by the name of the file."""
    entries = list_entries()
    described = find_described()
    return {
        f"{name}.rst": make_page(name, part, described)
        for name, part in entries.items()
    }


def write_pages(folder: Path) -> None:
    """Writes the pages into `folder`, where one differs."""
    folder.mkdir(exist_ok=True)
    pages = make_pages()
    for path in folder.glob("*.rst"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def is_class(entry: Entry) -> bool:
    """Returns whether an entry has members to describe."""
    return inspect.isclass(entry.value)


def make_page(module_name: str, entries: list[Entry], described: set[type]) -> str:
    """Returns a page in reStructuredText.

    Args:
        module_name: The module.
        entries: What it offers.
        described: The classes that have a place of their own on some page.
    """
    lines = [module_name, "=" * len(module_name), ""]
    lines += [f".. automodule:: {module_name}", "   :no-members:", ""]
    lines += [".. list-table::", "   :widths: 35 65", ""]
    for entry in entries:
        role = "py:mod" if inspect.ismodule(entry.value) else "py:obj"
        short = entry.name.removeprefix(f"{module_name}.")
        lines += [f"   * - :{role}:`{short} <{entry.home}>`"]
        lines += [f"     - {entry.first_line}"]
    for entry in entries:
        if entry.home == entry.name and not inspect.ismodule(entry.value):
            lines += ["", *make_entry(entry, described)]
    return "\n".join([*lines, ""])


def make_entry(entry: Entry, described: set[type]) -> list[str]:
    """Returns the directive that describes an object with all its members."""
    if not is_class(entry):
        kind = "function" if inspect.isroutine(entry.value) else "data"
        return [f".. auto{kind}:: {entry.name}"]
    lines = [f".. autoclass:: {entry.name}", "   :members:"]
    if find_shown_bases(entry.value, described):
        lines.append("   :show-inheritance:")
    # What bases without a place of their own define is described here.
    bases = entry.value.__mro__[1:]
    if is_hidden(bases[0], described):
        end = next(base for base in bases if not is_hidden(base, described))
        lines.append(f"   :inherited-members: {end.__name__}")
    return lines


def find_shown_bases(value: type, described: set[type]) -> list[type]:
    """Returns the bases of a class that tell a reader something."""
    bases = [base for base in value.__bases__ if base is not object]
    return [base for base in bases if not is_hidden(base, described)]


def is_hidden(value: type, described: set[type]) -> bool:
    """Returns whether a class is of the library, and has no place of its own."""
    return value.__module__.startswith("armillary") and value not in described
