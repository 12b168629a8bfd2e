"""Rules about the tests themselves: one marker chooses, and no test measures time."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.left_out import MAX_LINES, summarize
from tests.patience import FACTOR, patience, wait_until

TESTS = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())
CLOCKS = {"time", "monotonic", "perf_counter", "process_time"}
# The limit of these calls is a keyword; the limit of the second ones may stand alone.
WAITS = {"run", "communicate", "result", "check_output", "check_call", "get"}
WAITS_BY_POSITION = {"wait", "join"}
LIMIT = "Write the limit as `patience(120)`, of `tests/patience.py`."
# These tests are about clocks themselves, and the limit of `wait_until` is the product.
OF_CLOCKS = {"patience.py"}


def read_trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(TESTS.rglob("*.py")):
        if path.name not in OF_CLOCKS:
            yield str(path.relative_to(TESTS)), ast.parse(path.read_text())


def reads_clock(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "time"
        and node.func.attr in CLOCKS
    )


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def has_fixed_limit(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False

    name = node.func.attr
    by_keyword = any(
        each.arg == "timeout" and is_number(each.value) for each in node.keywords
    )
    if name in WAITS | WAITS_BY_POSITION and by_keyword:
        return True
    is_alone = len(node.args) == 1 and not node.keywords
    # A whole number below 60 may be the index of a process of a job.
    return (
        name in WAITS_BY_POSITION
        and is_alone
        and is_number(node.args[0])
        and (isinstance(node.args[0].value, float) or node.args[0].value >= 5)
    )


def test_one_marker_chooses_tests():
    markers = PROJECT["tool"]["pytest"]["ini_options"]["markers"]
    assert [marker.partition(":")[0] for marker in markers] == ["slow"]


def test_no_test_asserts_what_a_clock_says():
    found = [
        f"{name}:{node.lineno}"
        for name, tree in read_trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) and any(map(reads_clock, ast.walk(node.test)))
    ]
    assert not found, "Wait for an event, with `wait_until` of `tests/patience.py`."


def test_every_limit_grows_with_the_load_of_the_machine():
    found = [
        f"{name}:{node.lineno}"
        for name, tree in read_trees()
        for node in ast.walk(tree)
        if has_fixed_limit(node)
    ]
    assert not found, LIMIT


def test_limits_grow_with_what_was_measured(monkeypatch):
    monkeypatch.setenv(FACTOR, "2.5")
    assert patience(10.0) == 25.0


def test_waiting_ends_at_the_event_or_names_it(monkeypatch):
    answers = iter([0, 0, 3])
    assert wait_until(lambda: next(answers), "a number") == 3
    with pytest.raises(AssertionError, match=r"Waited 0 s in vain: the end"):
        wait_until(lambda: False, lambda: "the end", seconds=0.0)


def test_the_summary_of_left_out_tests_has_at_most_five_lines():
    reasons = [f"Skipped: reason {number // 3}. More." for number in range(30)]
    lines = summarize(1200, "not slow", reasons)
    assert len(lines) == MAX_LINES
    assert lines[0] == "1,200 tests marked `slow`: `make test-all` runs all tests."
    assert lines[1] == "3 tests: reason 0."
    assert "21 tests: 7 other reasons" in lines[-1]
    assert summarize(0, "", []) == []
    assert len(summarize(0, "", reasons[:15])) == MAX_LINES


def test_a_long_reason_is_one_line():
    (line,) = summarize(0, "", ["Skipped: Some\n  words " + "x" * 200])
    assert re.fullmatch(r"1 test: Some words x+\.\.\.", line)
    assert len(line) < 120
