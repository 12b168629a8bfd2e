"""Tests that numbers on pages equal the numbers of the code and of measurements."""

import re
import tomllib

import pytest

from tests.checkpoint.test_power_cut import NUM_CUTS
from tests.meta.test_docs import DOCUMENTS, REPOSITORY, name_of
from tests.recovery.faults import FAULTS
from tests.recovery.test_soak import SHARDED, SOME

MAKEFILE = (REPOSITORY / "Makefile").read_text()
[COMPATIBILITY] = (REPOSITORY / "docs").rglob("compatibility.md")
TABLE = COMPATIBILITY.read_text()
CHANGELOG = REPOSITORY / "CHANGELOG.md"
PAGES = [*DOCUMENTS, CHANGELOG, REPOSITORY / "Makefile"]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
WORDS = {10: "ten"}
EXTRA = re.compile(r"(?:armillary|\.whl|'\.|\"\.)\[(\w+)\]")


def count(row: str) -> int:
    """Returns a number of the table that `make differential` writes."""
    [number] = re.findall(rf"^\| {row} \| (\d+) \|$", TABLE, re.M)
    return int(number)


def read_default(variable: str) -> int:
    """Returns the default of a variable of the Makefile."""
    [number] = re.findall(rf"^{variable} \?= (\d+)$", MAKEFILE, re.M)
    return int(number)


def read_minutes(command: str) -> str:
    """Returns the minutes that `make` states for a command."""
    [minutes] = re.findall(rf'@echo "make {command} +[^"]*?(\d+) minutes', MAKEFILE)
    return minutes


def find_numbers(path, rule: str) -> set[int]:
    """Returns the numbers before words in a text, across the ends of lines."""
    text = " ".join(path.read_text().split())
    return {
        int(each.replace(",", "")) for each in re.findall(rf"([\d,]+) {rule}", text)
    }


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_counts_are_counts_of_the_code(path):
    constructs = count("constructs")
    faults = {read_default("KILLS"), len(SOME) + len(SHARDED)}
    assert find_numbers(path, "constructs") <= {constructs, round(constructs, -2)}
    assert find_numbers(path, "trainings") <= {count("trainings compared")}
    assert find_numbers(path, "(?:injected )?faults") <= faults
    assert find_numbers(path, "simulated (?:power )?cuts") <= {NUM_CUTS}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_faults_have_as_many_kinds_as_pages_say(path):
    text = " ".join(path.read_text().split())
    assert set(re.findall(r"faults of (\w+) kinds", text)) <= {WORDS[len(FAULTS)]}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_pages_and_make_agree_on_the_minutes_of_a_command(path):
    text = " ".join(path.read_text().split())
    for command in ("test", "test-all"):
        # A sentence about another command may stand in between, but no other number.
        found = re.findall(rf"`make {command}`[^\d`]*?(\d+) minutes", text)
        found += re.findall(rf"make {command} +#[^#\d]*(\d+) minutes", text)
        assert set(found) <= {read_minutes(command)}, command


def test_the_minutes_are_found_where_they_stand():
    contributing = " ".join((REPOSITORY / "CONTRIBUTING.md").read_text().split())
    assert f"{read_minutes('test')} minutes" in contributing
    assert f"{read_minutes('test-all')} minutes" in contributing


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_each_extra_that_a_page_names_exists(path):
    extras = PROJECT["optional-dependencies"].keys() | {"EXTRA"}
    assert set(EXTRA.findall(path.read_text())) <= extras
