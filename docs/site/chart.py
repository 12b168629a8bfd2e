"""Draws the results of `docs/internals/performance.md` as a bar chart.

python docs/site/chart.py
"""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
CHART = DOCS / "images" / "performance.svg"
PAGE = DOCS / "internals" / "performance.md"

_RATIO = re.compile(r"([\d.]+) \(([\d.]+)-([\d.]+)\)")
_WIDTH, _LEFT, _UNIT, _ROW, _TOP = 760, 276, 140, 26, 56
_STYLE = """
    text { font: 14px Arial, Helvetica, sans-serif; fill: #1f2933 }
    .title { font-weight: bold; font-size: 15px }
    .note { fill: #52606d; font-size: 13px }
    .bar { fill: #3f7cac }
    .slower { fill: #c8952c }
    .range { stroke: #1f2933; stroke-width: 1.5 }
    .hand { stroke: #1f2933; stroke-width: 1.5; stroke-dasharray: 4 3 }"""


def read_results() -> list[tuple[str, float, float, float]]:
    """Returns the label, the median, the lowest and the highest ratio of each row.

    A row for a hand-written loop that lacks a setting is left out.
    """
    section = PAGE.read_text().partition("## Results on two CPU cores")[2]
    section = section.partition("\n## ")[0]
    results = []
    task = ""
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        ratio = _RATIO.fullmatch(cells[3]) if len(cells) > 3 else None
        if ratio is None:
            continue
        task = cells[0].replace("`", "") or task
        if "without" not in task:
            steps = "1 step" if cells[1] == "1" else f"{cells[1]} steps"
            results.append((f"{task}, {steps}", *map(float, ratio.groups())))
    return results


def _find_place(result: tuple[str, float, float, float]) -> tuple[str, int]:
    task, _, steps = result[0].rpartition(", ")
    return task, int(steps.split()[0])


def draw_chart() -> str:
    """Returns the chart as SVG."""
    results = sorted(read_results(), key=_find_place)
    bottom = _TOP + _ROW * len(results)
    hand = _LEFT + _UNIT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 34}"'
        ' role="img" aria-labelledby="title">',
        '  <title id="title">Steps per second of Armillary, compared with the faster '
        "of two hand-written loops</title>",
        f"  <style>{_STYLE}\n  </style>",
        f'  <rect width="{_WIDTH}" height="{bottom + 34}" rx="8" fill="#ffffff"/>',
        '  <text class="title" x="16" y="28">Speed compared with a loop written by '
        "hand</text>",
        f'  <text class="note" x="{hand}" y="{_TOP - 6}" text-anchor="middle">'
        "1.0 = by hand</text>",
    ]
    for number, (label, median, low, high) in enumerate(results):
        top = _TOP + _ROW * number
        middle = top + _ROW // 2
        kind = "bar" if median >= 1 else "bar slower"
        first = f"{_LEFT + _UNIT * low:.0f}"
        last = f"{_LEFT + _UNIT * high:.0f}"
        lines += [
            f'  <text x="{_LEFT - 12}" y="{middle + 5}" text-anchor="end">{label}'
            "</text>",
            f'  <rect class="{kind}" x="{_LEFT}" y="{top + 4}" '
            f'width="{_UNIT * median:.0f}" height="{_ROW - 8}"/>',
            f'  <path class="range" d="M{first} {middle} H{last}"/>',
            f'  <text x="{_LEFT + _UNIT * max(high, 1.0) + 10:.0f}" y="{middle + 5}">'
            f"{median:.2f}</text>",
        ]
    lines += [
        f'  <path class="hand" d="M{hand} {_TOP} V{bottom}"/>',
        f'  <text class="note" x="16" y="{bottom + 22}">Median of the ratios; the line '
        "is the lowest and the highest. Two CPU cores, November 2026.</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    CHART.write_text(draw_chart())
