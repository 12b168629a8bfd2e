"""Tests of the table that the benchmarks print."""

import io
from dataclasses import asdict

from rich.console import Console

from benchmarks.protocol import Options
from benchmarks.report import list_reasons, make_table


def make_entry(task: str = "mlp", **changes) -> dict:
    def record(steps_per_second: float, median: float) -> dict:
        ratio = {"median": median, "low": median - 0.1, "high": median + 0.1}
        return {"steps_per_second": steps_per_second, "ratio": ratio}

    return {
        "task": task,
        "mode": "loop 100",
        **asdict(Options(steps_per_loop=100)),
        "reference": "reference-scan",
        "contestants": {
            "reference-scan": record(4000.0, 1.0),
            "reference-step": record(2000.0, 0.5),
            "armillary": record(3880.0, 0.97),
        },
        "skipped": {},
        "failed": {},
        **changes,
    }


def render(*cases: dict) -> str:
    console = Console(width=160, file=io.StringIO())
    console.print(make_table(cases))
    return console.file.getvalue()


def test_a_row_shows_the_reference_the_ratio_its_spread_and_the_speed():
    text = render(make_entry())
    assert "reference-scan" in text and "4,000" in text
    assert "0.97 (0.87 to 1.07)" in text and "3,880" in text


def test_a_contestant_that_is_missing_somewhere_keeps_its_column():
    peer = {"steps_per_second": 7.126, "ratio": {"median": 0.5, "low": 0.5, "high": 1}}
    first, second = make_entry(), make_entry("bert", failed={"armillary": "It broke."})
    first["contestants"]["keras"] = peer
    del second["contestants"]["armillary"]
    text = render(first, second)
    assert "7.13" in text and "failed" in text
    assert list_reasons([first, second]) == [
        "armillary FAILED bert (loop 100): It broke."
    ]
