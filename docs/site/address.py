"""The addresses of the project, which stand in `pyproject.toml` alone."""

import importlib
import inspect
import tomllib
from pathlib import Path
from typing import Any

from contents import REPOSITORY

_BRANCH = "main"
_PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
_ADDRESS = _PROJECT["urls"]["Repository"]
_ICON = (
    '<svg viewBox="0 0 16 16" width="1em" height="1em" fill="none" '
    'stroke="currentColor" stroke-width="1.5">'
    '<circle cx="4" cy="3" r="2"/><circle cx="4" cy="13" r="2"/>'
    '<circle cx="12" cy="6" r="2"/><path d="M4 5v6M12 8c0 3-8 1-8 3"/></svg>'
)


def make_theme_options() -> dict[str, Any]:
    """Returns the options of the theme that show links to the repository."""
    return {
        "source_edit_link": make_address("edit", "{filename}"),
        "source_view_link": make_address("blob", "{filename}"),
        "top_of_page_buttons": ["view", "edit"],
        "footer_icons": [
            {"name": "Repository", "url": _ADDRESS, "html": _ICON, "class": ""}
        ],
    }


def make_address(kind: str, name: str) -> str:
    """Returns the address of a file: `"blob"` shows it, `"edit"` opens an editor."""
    return f"{_ADDRESS}/{kind}/{_BRANCH}/{name}"


def link_to_source(page: str, context: dict[str, Any]) -> None:
    """Lets a page of the reference link to the docstrings that it comes from.

    Args:
        page: The page, such as `docs/reference/armillary.Controller`.
        context: The values that the template of the page reads.
    """
    folder, _, name = page.rpartition("/")
    if folder != "docs/reference":
        return
    path = find_source(name).relative_to(REPOSITORY).as_posix()
    context["theme_source_edit_link"] = make_address("edit", path)
    context["theme_source_view_link"] = make_address("blob", path)


def find_source(name: str) -> Path:
    """Returns the file that defines a public module or class."""
    owner, _, short = name.rpartition(".")
    is_class = short[0].isupper()
    value = (
        getattr(importlib.import_module(owner), short)
        if is_class
        else importlib.import_module(name)
    )
    return Path(inspect.getfile(value)).resolve()
