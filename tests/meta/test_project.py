"""Tests of the project's own files that no other tool checks."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker

from armillary._jax_compat import NEWEST_TESTED

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())

# A home or a mounted folder of one machine, and the address of a package index.
MACHINE_PATH = re.compile(r"(?<![\w.~$}])/(?:home|root|Users|work|workspace|mnt)/\w")
INDEX_ADDRESS = re.compile(r"py(?:pi)\.org|python(?:hosted)|npm(?:js)\.", re.IGNORECASE)


def list_files() -> list[Path]:
    """Returns the files of the checkout that git does not ignore."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        pytest.skip("This is no git checkout, so its own files cannot be listed.")
    paths = (REPOSITORY / name for name in listing.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def find_lines(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in list_files():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:  # A binary file holds no sentence.
            continue
        name = path.relative_to(REPOSITORY)
        found += [
            f"{name}:{number}: {line}"
            for number, line in enumerate(lines, start=1)
            if pattern.search(line)
        ]
    return found


def test_no_file_names_a_folder_of_one_machine():
    assert find_lines(MACHINE_PATH) == []


def test_no_file_names_a_package_index():
    assert find_lines(INDEX_ADDRESS) == []


PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MARKER = r'; python_version (<|>=) "3\.\d+"'


def read_pins(name: str, python: str = PYTHONS[-1]) -> dict[str, str]:
    """Returns the version of each package on a release of Python."""
    pins: dict[str, str] = {}
    for line in (REPOSITORY / name).read_text().splitlines():
        pin, _, marker = line.partition("; ")
        if marker and not Marker(marker).evaluate({"python_version": python}):
            continue
        package, version = pin.split("==")
        assert package not in pins, f"{name} pins {package} twice for Python {python}."
        pins[package] = version
    return pins


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-oldest.txt"])
def test_constraints_are_plain_sorted_pins(name):
    lines = (REPOSITORY / name).read_text().splitlines()
    assert lines == sorted(lines)
    pin = rf"[a-z0-9-]+==[\w.]+({MARKER})?"
    assert not [line for line in lines if not re.fullmatch(pin, line)]


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_pinned(python):
    pinned = read_pins("constraints.txt", python).keys()
    project = PROJECT["project"]
    groups = [
        project["dependencies"],
        *project["optional-dependencies"].values(),
        *PROJECT["dependency-groups"].values(),
    ]
    named = [entry for group in groups for entry in group]
    names = {re.split(r"[^\w-]", entry, maxsplit=1)[0].lower() for entry in named}
    assert names <= pinned


# Several releases of these are tested, and the bound is the oldest of them.
WIDE = ("equinox", "flax", "jax", "keras", "numpy", "optax", "orbax-checkpoint")


def test_the_oldest_set_is_what_the_bounds_say():
    oldest, project = read_pins("constraints-oldest.txt"), PROJECT["project"]
    extras = project["optional-dependencies"]
    bounds = dict(
        entry.split(">=")
        for entry in [*project["dependencies"], *extras["equinox"], *extras["keras"]]
    )
    for name in WIDE:
        assert re.fullmatch(re.escape(bounds[name]) + r"(\.\d+)*", oldest[name])


def test_the_newest_tested_jax_is_pinned():
    newest = ".".join(map(str, NEWEST_TESTED))
    assert newest == read_pins("constraints.txt")["jax"]
