"""Turns what a page names into links: files of the repository, and names of the API.

On GitHub a link may go to any file. On the site, each file that a page links to gets a
page of its own, and a link to a folder goes to the list of all of them.
"""

import functools
import html
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from contents import REPOSITORY, find_linked_files
from docutils import nodes
from reference import list_entries
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

LIST_OF_FILES = "files"

_LANGUAGES = {".py": "python", ".sbatch": "bash", ".sh": "bash", ".yaml": "yaml"}
_PICTURES = {".png", ".svg"}
_CODE = re.compile(r"([A-Za-z_][\w.]*)(?:\(.*\))?")


def setup(app: Sphinx) -> None:
    """Connects the functions of this file to Sphinx."""
    # Before Sphinx takes a file that is linked to for one to download.
    app.connect("doctree-read", mark_files, priority=1)
    app.connect("doctree-read", mark_names)
    app.connect("missing-reference", resolve_file)
    app.connect("missing-reference", resolve_name)
    app.connect("html-collect-pages", make_file_pages)


def mark_files(app: Sphinx, tree: nodes.document) -> None:
    """Marks links to files and folders, which Sphinx would not know."""
    folder = (REPOSITORY / app.env.docname).parent
    for node in tree.findall(pending_xref):
        # A page that is called by the name of its file gets its title.
        if node["refdomain"] == "doc" and node.astext().endswith(".md"):
            node["refexplicit"] = False
    for node in [*tree.findall(download_reference), *tree.findall(pending_xref)]:
        if node["reftype"] != "myst":
            continue
        target = node["reftarget"]
        path = Path(os.path.normpath(folder / target))
        if node["refdomain"] != "doc" and path.exists():
            name = path.relative_to(REPOSITORY).as_posix()
            name = LIST_OF_FILES if path.is_dir() else name
        elif target == "README":  # The front page says the same.
            name = app.config.root_doc
        else:
            continue
        node.replace_self(
            pending_xref(
                "",
                *break_paths(node),
                refdomain="",
                refdoc=app.env.docname,
                reftype="file",
                reftarget=name,
            )
        )


def break_paths(node: nodes.Element) -> list[nodes.Node]:
    """Returns the text of a link, which a narrow column may break after `/` or `_`."""
    parts = re.split("(?<=[/_])", node.astext())
    rest = [
        piece
        for part in parts[1:]
        for piece in (nodes.raw("", "<wbr>", format="html"), nodes.Text(part))
    ]
    return [nodes.inline("", "", nodes.Text(parts[0]), *rest, classes=["xref"])]


def mark_names(app: Sphinx, tree: nodes.document) -> None:
    """Marks code in a sentence that is the name of a public object."""
    names = read_names()
    for node in list(tree.findall(nodes.literal)):
        found = _CODE.fullmatch(node.astext())
        if not found or "xref" in node["classes"] or find_home(names, found[1]) is None:
            continue
        if isinstance(node.parent, nodes.title | nodes.reference | pending_xref):
            continue
        mark = pending_xref(
            "",
            refdomain="py",
            reftype="obj",
            reftarget=found[1],
            refdoc=app.env.docname,
        )
        node.replace_self(mark)
        mark += node


@functools.cache
def read_names() -> dict[str, str]:
    """Returns where public names are described, by the full name.

    Names alone are there too if they look like names, and mean one thing: `Controller`
    and `get_strategy`, but not `function`.
    """
    names = {}
    homes: dict[str, set[str]] = {}
    for entry in itertools.chain.from_iterable(list_entries().values()):
        names[entry.name] = entry.home
        short = entry.name.rpartition(".")[2]
        if "_" in short or not short.islower():
            homes.setdefault(short, set()).add(entry.home)
    return names | {short: x.pop() for short, x in homes.items() if len(x) == 1}


def find_home(names: dict[str, str], name: str) -> str | None:
    """Returns where `name`, or the member of a class that it names, is described."""
    if name in names:
        return names[name]
    owner, _, member = name.rpartition(".")
    return f"{names[owner]}.{member}" if owner in names else None


def resolve_name(
    app: Sphinx, env, node: pending_xref, text: nodes.Element
) -> nodes.Element | None:
    """Returns a link to the description of a name that Sphinx does not find itself."""
    if node["refdomain"] != "py":
        return None
    home = find_home(read_names(), node["reftarget"])
    if home is None:
        return None
    return env.domains["py"].resolve_xref(
        env, node["refdoc"], app.builder, "obj", home, node, text
    )


def resolve_file(
    app: Sphinx, env, node: pending_xref, text: nodes.Element
) -> nodes.Element | None:
    """Returns a link to the page of a file."""
    if node["reftype"] != "file":
        return None
    return make_refnode(
        app.builder, node["refdoc"], node["reftarget"], "", list(node.children)
    )


def make_file_pages(app: Sphinx) -> Iterator[tuple[str, dict, str]]:
    """Makes a page of each file that a page links to, and one that lists them."""
    rows = []
    for path in find_linked_files():
        if path.suffix in _PICTURES:
            continue
        name = path.relative_to(REPOSITORY).as_posix()
        code = path.read_text()
        language = _LANGUAGES.get(path.suffix, "text")
        block = app.builder.highlighter.highlight_block(code, language)
        title = html.escape(name)
        body = f"<h1>{title}</h1>\n{block}"
        yield name, {"title": title, "body": body}, "page.html"
        target = app.builder.get_relative_uri(LIST_OF_FILES, name)
        rows.append(f'<li><a href="{target}">{title}</a></li>')
    body = f"<h1>Files of the repository</h1>\n<ul>{''.join(rows)}</ul>"
    yield LIST_OF_FILES, {"title": "Files", "body": body}, "page.html"
