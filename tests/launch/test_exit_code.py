"""The exit codes are those of the documentation, and reached from the package."""

import re
from pathlib import Path

import armillary
from armillary.launch import ExitCode

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "launch.md"


def test_the_documentation_lists_every_exit_code():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert rows == [(str(code.value), code.name) for code in ExitCode]


def test_the_codes_are_reached_from_the_package():
    assert armillary.cluster.ExitCode is ExitCode
