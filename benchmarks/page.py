"""Writes the page that compares libraries, from the document of the measurements.

python -m benchmarks --json bench.json --contestants ...
python -m benchmarks.lifecycle --json bench.json --contestants ...
python -m benchmarks.page bench.json peers.md
"""

import argparse
import json
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contestants import CONTESTANTS, REFERENCES
from benchmarks.lifecycle import LOSS_TOLERANCE, list_problems, make_rows
from benchmarks.report import list_reasons

_LINE = 100
_HEAD = """\
# Measured next to other libraries

The benchmarks have written this page. It compares Armillary with other libraries on the
same tasks. [Performance measurements](performance.md#kauldron-and-tunix) has the
commands, and describes the tasks and the method.
"""
_SPEED = """\
## Steps per second

Each figure is relative to the faster of two loops that are written by hand: the median
of {rounds} rounds, with the lowest and the highest in brackets. "Loop 10" has 10 steps
per loop. A figure above 1 means more steps per second than by hand.
"""
_LIFE = """\
## From the start of a process to a restore

Time counts from the start of the process, with an empty and with a filled compilation
cache. Losses are compared over 10 steps with the scan by hand, and may differ by
{tolerance:.0e}. "Equal bits" means that they do not differ at all.
"""
_TITLES = (
    *("task", "contestant", "first step, cold", "warm", "host memory", "save"),
    *("restore", "saved", "losses next to the scan", "losses after the restore"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.page", description="Writes the page of comparisons."
    )
    parser.add_argument("document", type=Path, help="what `--json` has written")
    parser.add_argument("output", type=Path, help="the page")
    given = parser.parse_args(arguments)
    document = json.loads(given.document.read_text())
    given.output.write_text(make_page(document))


def make_page(document: dict[str, Any]) -> str:
    """Returns the page of a document, as `benchmarks.report` describes documents."""
    cases = document.get("cases", [])
    life = document.get("measurements", {}).get("lifecycle", {})
    parts = [_HEAD, _describe(document)]
    if cases:
        rounds = document["settings"]["rounds"]
        parts += [_SPEED.format(rounds=rounds), _make_speeds(cases)]
    if life:
        parts += [_LIFE.format(tolerance=LOSS_TOLERANCE)]
        parts += [_make_table(_TITLES, make_rows(life), num_texts=2)]
    reasons = [*list_reasons(cases), *list_problems(life)]
    if reasons:
        parts.append("## Left out\n")
        parts.append("\n".join(f"- {reason}" for reason in reasons) + "\n")
    return "\n".join(parts)


def _describe(document: dict[str, Any]) -> str:
    machine = document["machine"]
    versions: dict[str, str] = {}
    for case in document.get("cases", []):
        for record in case["contestants"].values():
            versions |= record["versions"]
    listed = ", ".join(f"{name} {number}" for name, number in sorted(versions.items()))
    text = (
        f"Measured on {document['started'][:10]}, on {machine['cpu']} with "
        f"{machine['cores']} cores, under a load of {machine['load_at_start']:.1f} at "
        f"the start. Versions: {listed}."
    )
    return textwrap.fill(text, _LINE) + "\n"


def _make_speeds(cases: Sequence[dict[str, Any]]) -> str:
    found = {name for case in cases for name in case["contestants"]}
    names = [name for name in CONTESTANTS if name in found and name not in REFERENCES]
    rows = []
    for case in cases:
        reference = case["reference"]
        by_hand = case["contestants"].get(reference, {}).get("steps_per_second")
        row = [case["task"], case["mode"], "" if by_hand is None else f"{by_hand:,.1f}"]
        rows.append(
            row + [_show_ratio(case["contestants"].get(name)) for name in names]
        )
    return _make_table(("task", "mode", "by hand, steps/s", *names), rows, num_texts=2)


def _show_ratio(record: dict[str, Any] | None) -> str:
    if record is None:
        return ""
    ratio = record.get("ratio")
    if ratio is None:
        return f"{statistics.median(record['seconds']):.2f} s"
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def _make_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int
) -> str:
    numbers = len(titles) - num_texts
    lines = [titles, ["---"] * num_texts + ["---:"] * numbers, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
