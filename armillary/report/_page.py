"""The page: tables and charts of one run or of several, in one file."""

import bisect
import html
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from armillary._format import format_bytes, format_seconds, format_time
from armillary._optional import import_optional
from armillary.report._charts import LAYOUT, draw_curves, draw_speed, draw_time
from armillary.report._run_files import SPEED, Run

_FOLDER = Path(__file__).parent
# Fields of the first record that stand elsewhere on the page.
_ELSEWHERE = frozenset({"config", "folder", "parameters", "record", "step", "time"})
_MOST_MODULES = 40


def make_page(runs: Sequence[Run], *, with_command: bool = False) -> str:
    """Returns the page of some runs, as HTML that needs no network.

    Command lines may hold passwords, so they are shown on request only.
    """
    title = "Plotly, with which `armillary report` draws,"
    graphs = import_optional("plotly.graph_objects", title, "report")
    offline = import_optional("plotly.offline", title, "report")
    names = ", ".join(_text(run.name) for run in runs)
    hidden = _ELSEWHERE if with_command else {*_ELSEWHERE, "command"}
    records = [
        {name: value for name, value in run.record.items() if name not in hidden}
        for run in runs
    ]
    configs = [run.record.get("config") or {} for run in runs]

    def per_run(make: Callable[[Run], str]) -> str:
        made = {run.name: content for run in runs if (content := make(run))}
        if len(runs) == 1:
            return "".join(made.values())
        titled = (f"<h3>{_text(name)}</h3>{content}" for name, content in made.items())
        return "".join(titled)

    curves = [*draw_curves(runs, graphs), *draw_speed(runs, graphs)]
    sections = {
        "Runs": _overview(runs),
        "Curves": _grid(curves, offline),
        "Where the time went": per_run(
            lambda run: _grid(draw_time(run, graphs), offline)
        ),
        "Checkpoints": per_run(_checkpoints),
        "Model": per_run(_model),
        "Hyperparameters": _side_by_side(runs, configs) if any(configs) else "",
        "Record": _side_by_side(runs, records),
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
        figure.update_layout(**LAYOUT)
        options = {"responsive": True, "displaylogo": False}
        chart = offline.plot(
            figure, output_type="div", include_plotlyjs=False, config=options
        )
        cells.append(f'<div class="chart">{chart}</div>')
    return f'<div class="grid">{"".join(cells)}</div>' if cells else ""


def number(value: float) -> str:
    """Returns a number with few digits, or an integer with all."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def goodput_cells(run: Run) -> tuple[str, str, str]:
    """Returns the attempts of a run, its time and its goodput, if they are known."""
    goodput = run.goodput
    if goodput is None:
        return "", "", ""
    time = format_seconds(goodput.total_seconds)
    return number(goodput.num_attempts), time, f"{goodput.goodput:.1%}"


def _overview(runs: Sequence[Run]) -> str:
    """Returns a row for each run: how far it came, how long it took, and how well."""
    metrics = sorted({key for run in runs for key in run.curves if key[1] != SPEED})
    head = ["run", "began", "step", "state", "attempts", "time", "goodput"]
    head += [f"{source} {metric}" for source, metric in metrics]
    rows = []
    for run in runs:
        values = [run.curves.get(key) for key in metrics]
        last = ["" if each is None else number(each[-1][1]) for each in values]
        known = [_text(run.name), format_time(run.began), number(run.step), run.state]
        rows.append([*known, *goodput_cells(run), *last])
    return _table(head, rows)


def _checkpoints(run: Run) -> str:
    """Returns a row for each checkpoint, with the last evaluation at or before it."""
    if not run.checkpoints:
        return "<p>There are no checkpoints in the directory.</p>"
    keys = sorted({key for key in run.curves if key[0] != "train"})
    steps = [each.number for each in run.checkpoints]
    measured = [_measured(run.curves[key], steps) for key in keys]
    rows = []
    for index, each in enumerate(run.checkpoints):
        when = format_time(each.saved_at)
        folder = _text(each.path.relative_to(run.path))
        cells = [column[index] for column in measured]
        rows.append([number(each.number), when, *cells, folder])
    head = ["step", "saved", *(f"{source} {metric}" for source, metric in keys)]
    note = "<p>▼ lowest and ▲ highest of these checkpoints.</p>" if keys else ""
    return _table([*head, "folder"], rows) + note


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


def _model(run: Run) -> str:
    """Returns the modules of the model, the largest first."""
    parameters = run.record.get("parameters")
    if not isinstance(parameters, Mapping):
        return "<p>The run has not recorded its model.</p>"
    modules = parameters.get("modules") or []
    rows = [
        [_text(each["name"]), number(each["count"]), format_bytes(each["bytes"])]
        for each in modules[:_MOST_MODULES]
    ]
    if len(modules) > _MOST_MODULES:
        rows.append([f"and {len(modules) - _MOST_MODULES} more", "", ""])
    total = [number(parameters["count"]), format_bytes(parameters["bytes"])]
    head = ["module", "parameters", "size"]
    return _table(head, [*rows, ["<b>all</b>", *total]])


def _side_by_side(runs: Sequence[Run], records: Sequence[Mapping[str, Any]]) -> str:
    """Returns a row for each name in some dictionaries, marked if they differ."""
    rows, differing = [], set()
    for name in dict.fromkeys(name for record in records for name in record):
        cells = [_describe(record.get(name)) for record in records]
        if len(set(cells)) > 1:
            differing.add(len(rows))
        rows.append([_text(name), *(f"<code>{cell}</code>" for cell in cells)])
    return _table(["", *(run.name for run in runs)], rows, differing)


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], differing: Iterable[int] = ()
) -> str:
    """Returns a table of HTML cells, numbers to the right, with some rows marked."""
    right = {i for row in rows for i, cell in enumerate(row) if cell[:1].isdigit()}
    marked = {1 + index for index in differing}
    lines = []
    for index, cells in enumerate([[*map(_text, head)], *rows]):
        kind = "td" if index else "th"
        shown = (
            f'<{kind} class="{"number" if i in right else "text"}">{cell}</{kind}>'
            for i, cell in enumerate(cells)
        )
        mark = ' class="differs"' if index in marked else ""
        lines.append(f"<tr{mark}>{''.join(shown)}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _text(value: Any) -> str:
    """Returns a value as it may stand in HTML."""
    return html.escape(str(value))


def _describe(value: Any) -> str:
    if value is None or isinstance(value, str):
        return _text(value or "")
    return _text(json.dumps(value, ensure_ascii=False))
