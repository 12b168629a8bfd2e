"""The site: it lists every page, describes every public name, and can be built."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import zlib

import pytest

from tests.meta.test_docs import DOCUMENTS, REPOSITORY, find_blocks, name_of
from tests.meta.test_public_names import MODULES, list_public_names
from tests.patience import patience

SITE = REPOSITORY / "docs" / "site"
RECIPES = REPOSITORY / "docs" / "recipes"
MODULE_NAMES = ["armillary", *(module.name for module in MODULES)]


def load(name):
    path = SITE / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


contents = load("contents")
reference = load("reference")
address = load("address")
assistants = load("assistants")
members = load("members")


def test_every_page_is_in_the_contents_once():
    listed = [
        page
        for part in contents.LISTS
        for pages in contents.read_contents(part).values()
        for page in pages
    ]
    expected = {name_of(path) for path in DOCUMENTS} - {"README.md", "docs/index.md"}
    assert sorted(listed) == sorted({*expected, "CHANGELOG.md"})


def test_every_page_is_two_clicks_from_the_index():
    index = REPOSITORY / "docs" / "index.md"
    links = re.findall(r"\]\(([^)#\s:]+\.md)[^)]*\)", index.read_text())
    linked = {name_of((index.parent / link).resolve()) for link in links}
    below = {page for part in linked for page in contents.list_below(part)}
    assert {*contents.list_pages()} - linked - below == {"docs/index.md"}


def folder_of(page):
    return page.rpartition("/")[0]


def test_pages_under_one_heading_are_in_one_folder():
    for heading, pages in contents.read_contents("docs/index.md").items():
        # An index may have a folder of its own, and some pages are not in `docs/`.
        shared = {
            folder_of(page)
            for page in pages
            if page.startswith("docs/") and not page.endswith("/index.md")
        }
        assert len(shared) <= 1, heading


@pytest.mark.parametrize("page", contents.LISTS[1:])
def test_pages_below_a_page_are_in_its_folder(page):
    folders = {folder_of(below) for below in contents.list_below(page)}
    assert folders == {folder_of(page)}


def find_named_pages(folder):
    """Yields each page that a file of the code names, with the file."""
    for path in (REPOSITORY / folder).rglob("*"):
        if path.suffix in {".ipynb", ".py", ".tmpl", ".toml"}:
            for name in re.findall(r"\bdocs/[\w/]+\.md", path.read_text()):
                yield path.relative_to(REPOSITORY).as_posix(), name


def test_pages_that_code_names_exist():
    folders = ("armillary", "benchmarks", "docs/site", "examples", "tests")
    named = [pair for folder in folders for pair in find_named_pages(folder)]
    assert len(named) > 100
    missing = [pair for pair in named if not (REPOSITORY / pair[1]).exists()]
    assert missing == []


def find_targets(pages):
    return re.findall(r"^\.\. auto(?!module)\w+:: (.+)$", "\n".join(pages), re.M)


def test_every_public_name_is_described_once():
    pages = reference.make_pages()
    targets = find_targets(pages.values())
    assert len(targets) == len(set(targets))
    for module_name in MODULE_NAMES:
        module = importlib.import_module(module_name)
        for name in list_public_names(module):
            rule = rf":py:(\w+):`{name} <(.+)>`\n +- \S+"
            row = re.search(rule, pages[f"{module_name}.rst"])
            assert row, f"{module_name}.{name}"
            assert row[2] in (MODULE_NAMES if row[1] == "mod" else targets), row[0]


def test_the_table_of_names_is_up_to_date():
    table = (REPOSITORY / "docs" / "reference" / "api.md").read_text()
    assert table == reference.make_table(), "Run `python docs/site/reference.py`."
    listed = set(re.findall(r"^\| `(armillary\.[\w.]+)` \| \S", table, re.M))
    for module_name in MODULE_NAMES:
        module = importlib.import_module(module_name)
        names = {f"{module_name}.{name}" for name in list_public_names(module)}
        assert names <= listed, module_name


def list_members(name):
    page = reference.make_pages()[f"{name}.rst"]
    return set(re.findall(r"^   \.\. auto(?:method|property):: (.+)$", page, re.M))


def test_a_page_of_a_class_has_inherited_members():
    expected = {"distribute_dataset", "gather", "reduce", "run", "scope"}
    for name in ("MirroredStrategy", "OneDeviceStrategy", "ShardedStrategy"):
        assert expected <= list_members(f"armillary.{name}")
    assert "train_and_evaluate" in list_members("armillary.Controller")
    assert "train" in list_members("armillary.StepTrainer")


def test_a_page_of_a_class_has_no_internal_members():
    assert list_members("armillary.Checkpoint") == {"read", "restore", "save", "write"}
    assert "leave_program_mesh" not in list_members("armillary.MirroredStrategy")
    assert "train_step" not in list_members("armillary.StepTrainer")


def test_each_internal_member_exists():
    bases = {
        base.__name__: base
        for value in reference.find_described()
        for base in value.__mro__
    }
    for owner, names in members.INTERNAL.items():
        missing = [name for name in names if not hasattr(bases[owner], name)]
        assert not missing, owner


def test_each_page_of_the_reference_links_to_its_source():
    for page in reference.make_pages():
        path = address.find_source(page.removesuffix(".rst"))
        assert path.is_relative_to(REPOSITORY / "armillary"), page


HERE = "https://git.example/armillary"


def test_pages_link_to_the_repository_if_it_has_an_address():
    options = address.make_theme_options(HERE)
    assert options["source_edit_link"] == f"{HERE}/edit/main/{{filename}}"
    assert options["footer_icons"][0]["url"] == HERE

    context = {}
    address.link_to_source("docs/reference/api/armillary.Controller", context, HERE)
    path = "armillary/controller/_controller.py"
    assert context["theme_source_edit_link"] == f"{HERE}/edit/main/{path}"
    assert context["theme_source_view_link"] == f"{HERE}/blob/main/{path}"


def test_pages_have_no_links_to_a_repository_without_an_address():
    assert address.make_theme_options(None) == {"top_of_page_buttons": []}
    context = {}
    address.link_to_source("docs/reference/api/armillary.Controller", context, None)
    assert context == {}


def test_the_texts_for_assistants_have_each_page():
    content, pages = assistants.make_content(), assistants.make_pages()
    assert content.startswith("# Armillary\n\n> Training loops for JAX")
    assert ".md)" not in content
    for page in contents.list_pages():
        first_line = (REPOSITORY / page).read_text().partition("\n")[0]
        assert f"<!-- {page} -->\n\n{first_line}\n" in pages
        assert page == "docs/index.md" or f"]({page[:-3]}.html): " in content


def list_anchors(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.M)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_to_sections_resolve(path):
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", path.read_text())
    pages = [(path.parent / page if page else path, anchor) for page, anchor in links]
    assert [anchor for page, anchor in pages if anchor not in list_anchors(page)] == []


@pytest.mark.parametrize(
    "path",
    [path for path in RECIPES.glob("*.md") if path.name != "index.md"],
    ids=lambda path: path.stem,
)
def test_each_program_of_a_recipe_has_at_most_50_lines(path):
    programs = [
        body for info, _, body in find_blocks(path) if info.split()[:1] == ["python"]
    ]
    assert programs
    assert all(len(body.splitlines()) <= 50 for body in programs)


def test_the_page_of_recipes_names_each_program_that_no_test_runs():
    head = (RECIPES / "index.md").read_text().partition("\n## ")[0]
    named = set(re.findall(r"\]\((\w+\.md)\)", head))
    marks = {
        path.name
        for path in RECIPES.glob("*.md")
        if any("no-run" in info for info, _, _ in find_blocks(path))
    }
    assert marks == named


@pytest.mark.slow
def test_the_site_can_be_built(tmp_path):
    if any(importlib.util.find_spec(name) is None for name in ("furo", "myst_parser")):
        pytest.skip("Sphinx is not installed: `make docs` does that.")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html"]
    command += ["-c", "docs/site", ".", str(tmp_path)]
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(600),
    )
    assert ended.returncode == 0, ended.stderr
    inventory = (tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]
    described = {line.split()[0] for line in zlib.decompress(inventory).splitlines()}
    targets = find_targets(reference.make_pages().values())
    assert {name.encode() for name in targets} <= described
    assert {"llms.txt", "llms-full.txt"} <= {path.name for path in tmp_path.iterdir()}
    page = tmp_path / "docs" / "reference" / "api" / "armillary.Controller.html"
    assert page.is_file()
    # Nothing is fetched when a page is opened.
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|img|link)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text()
        )
        assert not fetched, page
