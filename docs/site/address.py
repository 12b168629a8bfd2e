"""Links from the site to the repository, if `pyproject.toml` has its address."""

import importlib
import inspect
import tomllib
from pathlib import Path
from typing import Any

from contents import REPOSITORY

_BRANCH = "main"
_PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
_ADDRESS: str | None = _PROJECT.get("urls", {}).get("Repository")
_ICON = (
    '<svg viewBox="0 0 16 16" width="1em" height="1em" fill="none" '
    'stroke="currentColor" stroke-width="1.5">'
    '<circle cx="4" cy="3" r="2"/><circle cx="4" cy="13" r="2"/>'
    '<circle cx="12" cy="6" r="2"/><path d="M4 5v6M12 8c0 3-8 1-8 3"/></svg>'
)


def make_theme_options(repository: str | None = _ADDRESS) -> dict[str, Any]:
    """Returns the options of the theme that show links to the repository.

    Args:
        repository: The address of the repository. Without it, pages have no links to
            their sources.
    """
    if repository is None:
        return {"top_of_page_buttons": []}
    return {
        "source_edit_link": make_address(repository, "edit", "{filename}"),
        "source_view_link": make_address(repository, "blob", "{filename}"),
        "top_of_page_buttons": ["view", "edit"],
        "footer_icons": [
            {"name": "Repository", "url": repository, "html": _ICON, "class": ""}
        ],
    }


def make_address(repository: str, kind: str, name: str) -> str:
    """Returns the address of a file: `"blob"` shows it, `"edit"` opens an editor."""
    return f"{repository}/{kind}/{_BRANCH}/{name}"


def link_to_source(
    page: str, context: dict[str, Any], repository: str | None = _ADDRESS
) -> None:
    """Lets a page of the reference link to the docstrings that it comes from.

    Args:
        page: The page, such as `docs/reference/api/armillary.Controller`.
        context: The values that the template of the page reads.
        repository: The address of the repository. Without it, there are no links.
    """
    folder, _, name = page.rpartition("/")
    if repository is None or folder != "docs/reference/api":
        return
    path = find_source(name).relative_to(REPOSITORY).as_posix()
    context["theme_source_edit_link"] = make_address(repository, "edit", path)
    context["theme_source_view_link"] = make_address(repository, "blob", path)


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
