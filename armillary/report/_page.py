"""The page: tables and charts of one run or of several, in one file.

The tables of the page, as HTML.
"""

import bisect
import html
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from armillary._format import format_bytes, format_seconds, format_time
from armillary._optional import import_optional
from armillary.report._charts import draw_curves, draw_speed, draw_time
from armillary.report._run_files import SPEED, Run

# Fields of the first record that stand elsewhere on the page.
_ELSEWHERE = frozenset({"config", "folder", "parameters", "record", "step", "time"})
_MOST_MODULES = 40


def text(value: Any) -> str:
    """Returns a value as it may stand in HTML."""
    return html.escape(str(value))


def overview(runs: Sequence[Run]) -> str:
    """Returns a row for each run: how far it came, how long it took, and how well."""
    metrics = sorted({key for run in runs for key in run.curves if key[1] != SPEED})
    head = ["run", "began", "step", "state", "attempts", "time", "goodput"]
    rows = []
    for run in runs:
        values = (run.curves.get(key) for key in metrics)
        rows.append(
            [
                text(run.name),
                format_time(run.began),
                number(run.step),
                run.state,
                *goodput_cells(run),
                *("" if points is None else number(points[-1][1]) for points in values),
            ]
        )
    columns = [f"{source} {metric}" for source, metric in metrics]
    return table(
        [*head, *columns], rows, numbers={2, *range(4, len(head) + len(columns))}
    )


def goodput_cells(run: Run) -> tuple[str, str, str]:
    """Returns the attempts of a run, its time and its goodput, if they are known."""
    goodput = run.goodput
    if goodput is None:
        return "", "", ""
    time = format_seconds(goodput.total_seconds)
    return number(goodput.num_attempts), time, f"{goodput.goodput:.1%}"


def checkpoints(run: Run) -> str:
    """Returns a row for each checkpoint, with the last evaluation at or before it."""
    if not run.checkpoints:
        return "<p>There are no checkpoints in the directory.</p>"
    keys = sorted({key for key in run.curves if key[0] != "train"})
    steps = [each.header.number for each in run.checkpoints]
    measured = [_measured(run.curves[key], steps) for key in keys]
    rows = []
    for index, each in enumerate(run.checkpoints):
        when = format_time(each.header.saved_at)
        folder = text(each.path.relative_to(run.path))
        cells = [column[index] for column in measured]
        rows.append([number(each.header.number), when, *cells, folder])
    columns = [f"{source} {metric}" for source, metric in keys]
    head = ["step", "saved", *columns, "folder"]
    note = "<p>▼ lowest and ▲ highest of these checkpoints.</p>" if keys else ""
    return table(head, rows, numbers=[0, *range(2, 2 + len(keys))]) + note


def _measured(points: Sequence[tuple[int, float]], steps: Sequence[int]) -> list[str]:
    """Returns what was measured at, or last before, each of some steps."""
    counts = [bisect.bisect(points, step, key=lambda point: point[0]) for step in steps]
    found = [points[count - 1] if count else None for count in counts]
    values = [point[1] for point in found if point and math.isfinite(point[1])]
    low, high = min(values, default=0.0), max(values, default=0.0)
    cells = []
    for step, point in zip(steps, found, strict=True):
        if point is None:
            cells.append("")
            continue
        at, value = point
        mark = {low: "▼", high: "▲"}.get(value, "") if low != high else ""
        where = "" if at == step else f' <span class="soft">at {at:,}</span>'
        cells.append(f'{number(value)}{where} <span class="mark">{mark}</span>')
    return cells


def model(run: Run) -> str:
    """Returns the modules of the model, the largest first."""
    parameters = run.record.get("parameters")
    if not isinstance(parameters, Mapping):
        return "<p>The run has not recorded its model.</p>"
    modules = parameters.get("modules") or []
    rows = [
        [text(each["name"]), number(each["count"]), format_bytes(each["bytes"])]
        for each in modules[:_MOST_MODULES]
    ]
    if len(modules) > _MOST_MODULES:
        rows.append([f"and {len(modules) - _MOST_MODULES} more", "", ""])
    total = [number(parameters["count"]), format_bytes(parameters["bytes"])]
    head = ["module", "parameters", "size"]
    return table(head, [*rows, ["<b>all</b>", *total]], numbers=[1, 2])


def side_by_side(runs: Sequence[Run], records: Sequence[Mapping[str, Any]]) -> str:
    """Returns a row for each name of some dictionaries, which stand beside each other.

    Rows in which they differ are marked.
    """
    names = list(dict.fromkeys(name for record in records for name in record))
    rows, differing = [], set()
    for name in names:
        cells = [_describe(record.get(name)) for record in records]
        if len(set(cells)) > 1:
            differing.add(len(rows))
        rows.append([text(name), *(f"<code>{cell}</code>" for cell in cells)])
    head = ["", *(run.name for run in runs)]
    return table(head, rows, differing=differing)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Iterable[int] = (),
    differing: Iterable[int] = (),
) -> str:
    """Returns a table."""
    right, marked = set(numbers), set(differing)

    def cell(kind: str, index: int, content: str) -> str:
        name = "number" if index in right else "text"
        return f'<{kind} class="{name}">{content}</{kind}>'

    lines = ["".join(cell("th", i, text(name)) for i, name in enumerate(head))]
    lines += ["".join(cell("td", i, c) for i, c in enumerate(row)) for row in rows]
    body = "".join(
        f'<tr class="differs">{line}</tr>'
        if number - 1 in marked
        else f"<tr>{line}</tr>"
        for number, line in enumerate(lines)
    )
    return f'<div class="scroll"><table>{body}</table></div>'


def number(value: float) -> str:
    """Returns a number with few digits, or an integer with all."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def _describe(value: Any) -> str:
    if value is None:
        return ""
    return text(
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )


_FOLDER = Path(__file__).parent
# The colors of text and lines are set by the page.
_LAYOUT = {
    "autosize": True,
    "height": 340,
    "margin": {"l": 56, "r": 16, "t": 48, "b": 44},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, sans-serif", "size": 13},
    "legend": {"orientation": "h", "y": -0.28},
    "hovermode": "x unified",
    "modebar": {
        "bgcolor": "rgba(0,0,0,0)",
        "color": "#9198a1",
        "activecolor": "#3B8FD9",
    },
}


def make_page(runs: Sequence[Run], *, with_command: bool = False) -> str:
    """Returns the page of some runs, as HTML that needs no network.

    Command lines may hold passwords, so they are shown on request only.
    """
    title = "Plotly, with which `armillary report` draws,"
    graphs = import_optional("plotly.graph_objects", title, "report")
    offline = import_optional("plotly.offline", title, "report")
    names = ", ".join(text(run.name) for run in runs)
    curves = draw_curves(runs, graphs)
    speed = draw_speed(runs, graphs)
    figures = [*curves.values(), *([] if speed is None else [speed])]
    times = {run.name: draw_time(run, graphs) for run in runs}
    charts = [(name, figure) for name, figure in times.items() if figure is not None]
    hidden = _ELSEWHERE if with_command else {*_ELSEWHERE, "command"}
    records = [
        {name: value for name, value in run.record.items() if name not in hidden}
        for run in runs
    ]
    configs = [run.record.get("config") or {} for run in runs]
    sections = {
        "Runs": overview(runs),
        "Curves": _grid(figures, offline),
        "Where the time went": "".join(
            _titled(runs, name, _grid([figure], offline)) for name, figure in charts
        ),
        "Checkpoints": _per_run(runs, checkpoints),
        "Model": _per_run(runs, model),
        "Hyperparameters": side_by_side(runs, configs) if any(configs) else "",
        "Record": side_by_side(runs, records),
    }
    body = "".join(
        f"<h2>{title}</h2>{content}" for title, content in sections.items() if content
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{names}</title>
<style>
{(_FOLDER / "style.css").read_text()}</style>
<script>{offline.get_plotlyjs()}</script>
</head>
<body>
<h1>{names}</h1>
{body}
<footer>Written by <code>armillary report</code>.</footer>
<script>
{(_FOLDER / "colors.js").read_text()}</script>
</body>
</html>
"""


def _grid(figures: Iterable[Any], offline: Any) -> str:
    cells = []
    for figure in figures:
        figure.update_layout(**_LAYOUT)
        options = {"responsive": True, "displaylogo": False}
        chart = offline.plot(
            figure, output_type="div", include_plotlyjs=False, config=options
        )
        cells.append(f'<div class="chart">{chart}</div>')
    return f'<div class="grid">{"".join(cells)}</div>' if cells else ""


def _per_run(runs: Sequence[Run], make: Callable[[Run], str]) -> str:
    return "".join(_titled(runs, run.name, make(run)) for run in runs)


def _titled(runs: Sequence[Run], name: str, content: str) -> str:
    return f"<h3>{text(name)}</h3>{content}" if len(runs) > 1 else content
