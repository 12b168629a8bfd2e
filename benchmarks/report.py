"""The table for people and the document for programs.

The document is one JSON object: `schema` (1), `started`, `machine`, `device`,
`settings`, `cases` (one entry for each, see below) and `measurements` (what the further
commands add, by name). An entry of `cases` has the fields of `Options`, `task`, `size`,
`mode`, `burst_steps`, `reference` (the faster one), `contestants`, and `skipped` and
`failed` (reasons by name). A contestant has `seconds` (of each burst), `losses`,
`steps_per_second`, `ratio` (`median`, `low`, `high`; speed relative to the reference),
`setup_seconds`, `versions`, `facts`.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.contestants import CONTESTANTS, REFERENCES

SCHEMA = 1


def make_table(cases: Sequence[dict[str, Any]]) -> Table:
    """Returns the table of measured cases, which are entries from `measure_case`."""
    found = {name for case in cases for name in case["contestants"]}
    names = [name for name in CONTESTANTS if name in found and name not in REFERENCES]
    table = Table(
        title="Speed relative to the faster hand-written loop (lowest to highest)",
        pad_edge=False,
    )
    table.add_column("task")
    table.add_column("mode")
    table.add_column("reference")
    table.add_column("steps/s", justify="right", style="dim")
    for name in names:
        table.add_column(name, justify="right")
        table.add_column("steps/s", justify="right", style="dim")
    last = None
    for case in cases:
        if last not in (None, case["task"]):
            table.add_section()
        last = case["task"]
        cells = [case["task"], case["mode"], *_reference_cells(case)]
        for name in names:
            cells += _contestant_cells(case, name)
        table.add_row(*cells)
    return table


def list_reasons(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for each reason why a contestant is missing, once."""
    lines: dict[str, None] = {}
    for case in cases:
        for name, reason in case["skipped"].items():
            lines[f"{name} left out of {case['task']} ({case['mode']}): {reason}"] = (
                None
            )
        for name, reason in case["failed"].items():
            lines[f"{name} FAILED {case['task']} ({case['mode']}): {reason}"] = None
    return list(lines)


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Writes the document, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(document, indent=2) + "\n")
    partial.replace(path)


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Returns a parser for a command that measures one further thing."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=description
    )
    parser.add_argument("--json", type=Path, metavar="PATH")
    return parser


def add_measurement(
    path: Path | None, name: str, measurement: Mapping[str, Any]
) -> None:
    """Adds a further measurement to a document, which is made if there is none.

    Args:
        path: The document; `None` keeps nothing.
        name: The name of the measurement.
        measurement: The results.
    """
    if path is None:
        return
    document: dict[str, Any] = {"schema": SCHEMA}
    if path.exists():
        document = json.loads(path.read_text())
    document.setdefault("measurements", {})[name] = measurement
    write_document(path, document)


def _reference_cells(case: dict[str, Any]) -> list[str]:
    name = case["reference"]
    if name is None:
        return ["none", ""]
    return [name, _speed(case["contestants"][name])]


def _contestant_cells(case: dict[str, Any], name: str) -> list[str]:
    record = case["contestants"].get(name)
    if record is None:
        return ["failed" if name in case["failed"] else "", ""]
    ratio = record.get("ratio")
    if ratio is None:
        return ["", _speed(record)]
    text = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return [text, _speed(record)]


def _speed(record: dict[str, Any]) -> str:
    speed = record["steps_per_second"]
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"
