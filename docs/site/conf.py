"""Settings of Sphinx for the site that `make docs` builds.

The pages are those that GitHub shows, at the same paths, so that their links hold in
both places. `contents.py` says what the sidebar lists, `reference.py` writes the pages
of the reference, `links.py` turns files and names into links, `address.py` links to the
repository once it has an address, and `assistants.py` writes the pages as text.
"""

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parents[1])]
os.environ["KERAS_BACKEND"] = "jax"

import address  # noqa: E402
import assistants  # noqa: E402
import contents  # noqa: E402
import links  # noqa: E402
import reference  # noqa: E402

import armillary  # noqa: E402

project = "Armillary"
author = "the authors of Armillary"
project_copyright = ""
version = release = armillary.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [*contents.list_pages(), "docs/reference/api/*.rst"]
exclude_patterns = [
    ".*",
    "armillary",
    "benchmarks",
    "docs/_build",
    "runs",
    "tests",
]

myst_heading_anchors = 3
# In docstrings, single backticks are code, and a link where they name an object.
default_role = "py:obj"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
pygments_dark_style = "a11y-high-contrast-dark"
html_theme_options = address.make_theme_options()
html_title = f"Armillary {release}"
html_logo = html_favicon = "../images/logo.svg"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_additional_pages = {"index": "redirect.html"}
templates_path = ["templates"]


def setup(app):
    """Connects what makes the site from the pages to Sphinx."""
    app.connect("builder-inited", write_reference)
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-bases", hide_bases)
    app.connect("html-page-context", add_links)
    app.connect("build-finished", write_texts)
    links.setup(app)


def write_reference(app):
    """Writes the pages of the reference before Sphinx looks for pages."""
    reference.write_pages(reference.PAGES)


def add_contents(app, name, source):
    """Puts the contents of the site below the page that lists them."""
    page = f"{name}.md"
    if page in contents.LISTS:
        for caption, pages in contents.read_contents(page).items():
            source[0] += contents.make_toctree(caption, pages)
    elif page == "docs/reference/api.md":
        modules = reference.list_modules()
        pages = [f"docs/reference/api/{name}.rst" for name in modules]
        source[0] += contents.make_toctree("", pages)


def hide_bases(app, name, value, options, bases):
    """Leaves out the bases of a class that no page describes."""
    bases[:] = reference.find_shown_bases(value, reference.find_described())


def add_links(app, name, template, context, tree):
    """Links a page of the reference to the docstrings, not to a page of the sources."""
    address.link_to_source(name, context)


def write_texts(app, error):
    """Writes the pages as text, after they were written as HTML."""
    if error is None:
        assistants.write_files(Path(app.outdir))
