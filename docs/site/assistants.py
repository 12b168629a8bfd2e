"""Writes two files for assistants that read the documentation as text.

`llms.txt` lists the pages with a sentence for each, which comes from the tables of
`docs/index.md` and of other lists. `llms-full.txt` holds all pages in one file.
"""

import re
from pathlib import Path

from contents import (
    LISTS,
    REPOSITORY,
    list_below,
    list_pages,
    read_contents,
    read_entry,
)

_CONTENT = "llms.txt"
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_PAGES = "llms-full.txt"


def write_files(folder: Path) -> None:
    """Writes both files into the root of the site."""
    (folder / _CONTENT).write_text(make_content())
    (folder / _PAGES).write_text(make_pages())


def make_content() -> str:
    """Returns the list of pages, with their addresses on the site."""
    index = REPOSITORY / LISTS[0]
    title, _, rest = index.read_text().partition("\n")
    summary = rest.strip().partition("\n\n")[0].strip("*")
    all_pages = f"All pages in one file: [{_PAGES}]({_PAGES})"
    lines = [title, "", f"> {summary}", "", all_pages]

    descriptions = {}
    for page in LISTS:
        descriptions |= _read_descriptions(page)
    for caption, pages in read_contents(LISTS[0]).items():
        lines += ["", f"## {caption}", ""]
        for name in [each for page in pages for each in (page, *list_below(page))]:
            short, description = descriptions[name]
            address = f"{name.removesuffix('.md')}.html"
            lines.append(f"- [{short}]({address}): {description}")
    return "\n".join([*lines, ""])


def make_pages() -> str:
    """Returns all pages in the order of the site, each after a line with its path."""
    parts = [
        f"<!-- {name} -->\n\n{(REPOSITORY / name).read_text().strip()}\n"
        for name in list_pages()
    ]
    return "\n".join(parts)


def _read_descriptions(page: str) -> dict[str, tuple[str, str]]:
    """Returns title and description of each page that `page` lists."""
    folder = (REPOSITORY / page).parent
    entries = map(read_entry, (REPOSITORY / page).read_text().splitlines())
    return {
        (folder / target).resolve().relative_to(REPOSITORY).as_posix(): (
            title,
            # Links in a description are relative to its page, and not to the site.
            _LINK.sub(r"\1", text),
        )
        for title, target, text in filter(None, entries)
    }
