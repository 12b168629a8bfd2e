"""ARCHITECTURE.md names the layers and the files that there are."""

import re
import tomllib

from tests.meta.test_docs import REPOSITORY

TEXT = (REPOSITORY / "ARCHITECTURE.md").read_text()


def read_layers() -> list[set[str]]:
    """Returns the layers of the whole package, as `pyproject.toml` has them."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    [layers] = [
        contract["layers"]
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["containers"] == ["armillary"]
    ]
    return [set(layer.split(" | ")) for layer in layers]


def test_the_table_of_layers_is_the_one_that_is_checked():
    section = TEXT.partition("\n## Layers\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \|", section, re.M)
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == read_layers()


def test_each_file_that_is_named_exists():
    files = {path.name for path in (REPOSITORY / "armillary").rglob("*.py")}
    named = re.findall(r"`(?:[\w/]+/)?(_\w+\.py)`", TEXT)
    assert len(named) > 30
    assert set(named) <= files


def test_each_path_that_is_named_exists():
    roots = ("", "armillary", "armillary/data", "armillary/distribute")
    paths = re.findall(r"`((?:\w+/)+(?:_?\w+\.py)?)`", TEXT)
    assert len(paths) > 20
    for path in paths:
        assert any((REPOSITORY / root / path).exists() for root in roots), path
