"""CONTRIBUTING.md names files, functions, commands and words that exist."""

import re

import pytest

from tests.meta.test_docs import REPOSITORY

TEXT = (REPOSITORY / "CONTRIBUTING.md").read_text()
ROOTS = ("", "armillary/data/sources", "armillary/metrics", "tests", "tests/metrics")
ENDS = (".py", ".md", ".yaml", "/", "run")
# A name that the page places in a file, such as "`wait_until` of `tests/patience.py`".
PLACED = re.compile(
    r"`@?(\w+)[^`]*` (?:of|in)\s+`([\w./]+\.py)`|`(\w+)` \(`(_\w+\.py)`\)"
)


def find_path(name):
    """Returns the first file or folder of this name, which must exist."""
    paths = [REPOSITORY / root / name for root in ROOTS]
    return next(path for path in paths if path.exists())


def test_each_path_exists():
    code = re.findall(r"`([\w./-]+)`", TEXT)
    paths = [each for each in code if "/" in each or each.endswith(ENDS)]
    assert len(paths) > 12
    for path in paths:
        assert find_path(path), path


def test_each_name_is_in_the_file_that_the_page_says():
    found = [tuple(filter(None, groups)) for groups in PLACED.findall(TEXT)]
    assert {name for name, _ in found} >= {
        "FakeClock",
        "as_source",
        "check_source",
        "slow_after_first",
        "wait_until",
    }
    for name, path in found:
        assert re.search(rf"(?:def|class) {name}\b", find_path(path).read_text()), name


def test_the_search_for_a_message_finds_code_and_test():
    [(words, folders)] = re.findall(r'`git grep -n "([^"]+)" -- ([\w ]+)`', TEXT)
    for folder in folders.split():
        files = (REPOSITORY / folder).rglob("*.py")
        assert any(words in path.read_text() for path in files), folder


def test_the_example_of_a_change_finds_code_test_and_page():
    [search] = re.findall(r'^ +git grep -n "(.+)" -- ([\w/ ]+)$', TEXT, re.M)
    words, folders = search
    found = {
        path.name
        for folder in folders.split()
        for path in (REPOSITORY / folder).rglob("*.*")
        if path.suffix in {".py", ".md"} and words in path.read_text()
    }
    named = set(re.findall(r"\bIn `[\w/]*?(\w+\.py)`", TEXT))
    named |= set(re.findall(r"Change `[\w/]*?(\w+\.md)` and", TEXT))
    assert len(named) == 3
    assert named <= found
    [(path, words)] = re.findall(
        r"/pytest (tests/checkpoint/\S+) -k (\w+)$", TEXT, re.M
    )
    assert re.search(rf"^def test_\w*{words}", find_path(path).read_text(), re.M)


@pytest.mark.parametrize("command", ["setup", "test", "check"])
def test_the_script_of_ci_runs_the_commands_of_the_page(command):
    assert f"make {command} " in TEXT
    script = (REPOSITORY / ".ci" / "run").read_text()
    assert re.search(rf"^run make {command}$", script, re.M)
