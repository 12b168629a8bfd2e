"""Writes the reference: a page for each public module and class, and one table.

An object that several modules offer is described once, where users import it from; the
other pages refer to it. A class has its own page, an exception stands on the page of
its module. Nothing here needs Sphinx: the pages are text for `autodoc`.

`docs/reference/api.md` is the table, which is a part of the repository. This command
writes it again after a public name or the first line of its docstring has changed::

    python docs/site/reference.py
"""

import ast
import functools
import importlib
import inspect
import itertools
import os
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parents[1])]
os.environ.setdefault("KERAS_BACKEND", "jax")

from members import find_members  # noqa: E402

import armillary  # noqa: E402
import armillary.typing  # noqa: E402

TABLE = FOLDER.parent / "reference" / "api.md"
PAGES = FOLDER.parent / "reference" / "api"
_BEGINNING = """\
# API reference

<!-- Written by `python docs/site/reference.py`, from the docstrings. -->

Every public name, with the first line of its docstring. The site that `make docs`
builds has a page for each module and each class, with all arguments, members and
errors. In Python, `help(armillary.Controller)` shows the same.
"""


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
            elif is_own_class(value) or inspect.isroutine(value):
                home, doc = homes.setdefault(id(value), full_name), value.__doc__
            elif name in aliases:
                home, doc = f"armillary.typing.{name}", aliases[name]
            else:  # a value, such as `armillary.pretrained.tied`
                home, doc = full_name, value.__doc__
            first_line = inspect.cleandoc(doc or "").partition("\n")[0]
            entries[module_name].append(Entry(full_name, home, value, first_line))
    return entries


@functools.cache
def find_described() -> set[type]:
    """Returns the classes that have a place of their own on some page."""
    entries = itertools.chain.from_iterable(list_entries().values())
    return {entry.value for entry in entries if is_class(entry)}


def make_pages() -> dict[str, str]:
    """Returns the pages of all public modules and classes, by the name of the file."""
    entries = list_entries()
    described = find_described()
    pages = {f"{name}.rst": make_page(name, part) for name, part in entries.items()}
    for entry in itertools.chain.from_iterable(entries.values()):
        if has_page(entry) and entry.home == entry.name:
            pages[f"{entry.home}.rst"] = make_class_page(entry, described)
    return pages


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


def make_table() -> str:
    """Returns `docs/reference/api.md`: a table of the names of each public module."""
    lines = [_BEGINNING]
    for module_name, entries in list_entries().items():
        module = importlib.import_module(module_name)
        first_line = inspect.cleandoc(module.__doc__ or "").partition("\n")[0]
        lines += [f"## {module_name}", "", first_line, ""]
        lines += ["| name | description |", "| --- | --- |"]
        for entry in entries:
            description = entry.first_line.replace("|", "\\|")
            lines.append(f"| `{entry.name}` | {description} |")
        lines.append("")
    return "\n".join(lines)


def is_class(entry: Entry) -> bool:
    """Returns whether an entry has members to describe."""
    return is_own_class(entry.value)


def is_own_class(value: Any) -> bool:
    """Returns whether a value is a class of the library, and not of another one."""
    return inspect.isclass(value) and value.__module__.startswith("armillary")


def has_page(entry: Entry) -> bool:
    """Returns whether an entry is described on a page of its own."""
    return is_class(entry) and not issubclass(entry.value, BaseException)


def make_page(module_name: str, entries: list[Entry]) -> str:
    """Returns the page of a module in reStructuredText.

    Args:
        module_name: The module.
        entries: The names that it offers.
    """
    lines = [module_name, "=" * len(module_name), ""]
    lines += [f".. automodule:: {module_name}", "   :no-members:", ""]
    lines += [".. list-table::", "   :widths: 35 65", ""]
    for entry in entries:
        role = "py:mod" if inspect.ismodule(entry.value) else "py:obj"
        short = entry.name.removeprefix(f"{module_name}.")
        lines += [f"   * - :{role}:`{short} <{entry.home}>`"]
        lines += [f"     - {entry.first_line}"]

    own = [entry for entry in entries if entry.home == entry.name]
    pages = [f"   {entry.home}" for entry in own if has_page(entry)]
    if pages:
        lines += ["", ".. toctree::", "   :hidden:", "", *pages]
    for entry in own:
        if inspect.ismodule(entry.value) or has_page(entry):
            continue
        if is_class(entry):
            lines += ["", *make_class(entry, find_described())]
        else:
            kind = "function" if inspect.isroutine(entry.value) else "data"
            lines += ["", f".. auto{kind}:: {entry.name}"]
    return "\n".join([*lines, ""])


def make_class_page(entry: Entry, described: set[type]) -> str:
    """Returns the page of a class in reStructuredText.

    Args:
        entry: The class.
        described: The classes that have a place of their own on some page.
    """
    short = entry.name.rpartition(".")[2]
    lines = [short, "=" * len(short), "", f"``{entry.name}``", ""]
    lines += make_class(entry, described)
    aliases = find_members(entry.value).aliases
    if aliases:
        pairs = [
            f"``{alias}`` is :py:obj:`{name} <{entry.home}.{name}>`"
            for alias, name in aliases.items()
        ]
        lines += ["", f"Other names in TensorFlow: {', '.join(pairs)}."]
    return "\n".join([*lines, ""])


def make_class(entry: Entry, described: set[type]) -> list[str]:
    """Returns the directives that describe a class with all its members."""
    lines = [f".. autoclass:: {entry.name}"]
    if find_shown_bases(entry.value, described):
        lines.append("   :show-inheritance:")
    members = find_members(entry.value)
    for name in members.methods:
        lines += ["", f"   .. automethod:: {name}"]
    for name in members.properties:
        lines += ["", f"   .. autoproperty:: {name}"]
    return lines


def find_shown_bases(value: type, described: set[type]) -> list[type]:
    """Returns the bases of a class that tell a reader something."""
    bases = [base for base in value.__bases__ if base is not object]
    return [base for base in bases if not is_hidden(base, described)]


def is_hidden(value: type, described: set[type]) -> bool:
    """Returns whether a class of the library has no place of its own."""
    return value.__module__.startswith("armillary") and value not in described


if __name__ == "__main__":
    TABLE.write_text(make_table())
