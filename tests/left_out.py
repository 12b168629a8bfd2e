"""Prints at the end of a run which tests it left out and why, in at most five lines."""

from collections import Counter
from typing import Any

import pytest

MAX_LINES = 5
MAX_CHARACTERS = 100
NUM_DESELECTED = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NUM_DESELECTED] = 0


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        items[0].config.stash[NUM_DESELECTED] += len(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Sends the number from a worker of pytest-xdist to the process that prints."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["num_deselected"] = session.config.stash[NUM_DESELECTED]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # Every worker collects, and deselects, all tests.
    number = getattr(node, "workeroutput", {}).get("num_deselected", 0)
    stash = node.config.stash
    stash[NUM_DESELECTED] = max(stash[NUM_DESELECTED], number)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    lines = summarize(
        config.stash[NUM_DESELECTED],
        config.option.markexpr,
        [str(report.longrepr[-1]) for report in reports],
    )
    if lines:
        terminalreporter.section("left out")
    for line in lines:
        terminalreporter.write_line(line)


def summarize(num_deselected: int, selection: str, reasons: list[str]) -> list[str]:
    """Returns the lines: the tests that were not selected, then the largest groups."""
    lines = []
    if num_deselected and selection == "not slow":
        text = (
            f"{_count(num_deselected)} marked `slow`: `make test-all` runs all tests."
        )
        lines.append(text)
    elif num_deselected:
        lines.append(f"{_count(num_deselected)} not selected.")

    groups = Counter(map(_shorten, reasons)).most_common()
    num_shown = len(groups)
    if len(lines) + len(groups) > MAX_LINES:
        num_shown = MAX_LINES - 1 - len(lines)
    lines += [f"{_count(number)}: {reason}" for reason, number in groups[:num_shown]]

    rest = groups[num_shown:]
    if rest:
        number = _count(sum(number for _, number in rest))
        text = f"{number}: {len(rest)} other reasons, which `pytest -rs` prints."
        lines.append(text)
    return lines


def _count(number: int) -> str:
    return f"{number:,} test" + ("s" if number > 1 else "")


def _shorten(reason: str) -> str:
    """Returns the first sentence of a reason to skip, on one line."""
    text = " ".join(reason.removeprefix("Skipped: ").split())
    sentence = text.split(". ", 1)[0].removesuffix(".") + "."
    if len(sentence) > MAX_CHARACTERS:
        sentence = sentence[: MAX_CHARACTERS - 3].rstrip() + "..."
    return sentence
