"""The page: tables and charts (by Plotly) of one run or of several, in one file."""

import base64
import gzip
import html
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from armillary._format import format_bytes, format_scaled, format_seconds, format_time
from armillary._optional import import_optional
from armillary.goodput._stopwatch import Category
from armillary.report._run_files import SPEEDS, RecordedRun

# The units of the facts about each device, by the ends of their names.
_ENDS = {"_bytes": "B", "_second": "FLOP/s", "": "FLOP"}
_FOLDER = Path(__file__).parent
# Fields of the first record that are elsewhere on the page. The command line is never
# on the page, because it may hold passwords.
_ELSEWHERE = {"command", "config", "folder", "parameters", "record", "step", "time"}
_LAYOUT = {
    "autosize": True,
    "height": 340,
    "margin": {"l": 56, "r": 16, "t": 48, "b": 44},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, sans-serif", "size": 13},
    "legend": {"orientation": "h", "y": -0.28},
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#9198a1"},
    "xaxis": {"title": {"standoff": 6}},
    "template": "none",
}
# The colors of Okabe and Ito (https://jfly.uni-koeln.de/color), which color-blind
# people can tell apart too. The blue is lighter, for dark pages.
_COLORS = ("#3B8FD9", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
_CATEGORY_COLORS = {
    Category.STEPPING: "#009E73",
    Category.COMPILING: "#CC79A7",
    Category.DATA: "#E69F00",
    Category.SAVING: "#0072B2",
    Category.RESTORING: "#56B4E9",
    Category.EVALUATING: "#F0E442",
    Category.START_UP: "#999999",
    Category.OTHER: "#BBBBBB",
    Category.LOST: "#D55E00",
    Category.DOWN: "#7F3B08",
}
_EXTREMES = {"lowest": "#0072B2", "highest": "#D55E00"}
_UNITS = {"days": 86_400, "hours": 3600, "minutes": 60, "seconds": 1}
_DASHES = ("solid", "dash", "dot", "dashdot")
_MAX_POINTS = 2000
_FEW_POINTS = 60


def make_page(runs: Sequence[RecordedRun]) -> str:
    """Returns the page of some runs, as HTML that needs no network."""
    title = "Plotly, with which `armillary report` draws,"
    graphs = import_optional("plotly.graph_objects", title, "report")
    offline = import_optional("plotly.offline", title, "report")
    names = ", ".join(_text(run.name) for run in runs)
    sections = {
        "Runs": _overview(runs),
        "Curves": _grid(_draw_curves(runs, graphs)),
        "Where the time went": _grid(_draw_time(runs, graphs)),
        "Stragglers": _per_run(runs, _stragglers),
        "Checkpoints": _per_run(runs, _checkpoints),
        "Model": _per_run(runs, _model),
        "Hyperparameters": _hyperparameters(runs),
        "Record": _side_by_side(runs, list(map(_find_record, runs))),
    }
    body = ""
    for title, content in sections.items():
        if content:
            body += f"<h2>{title}</h2>{content}"
    # Compressed, the script has a third of its size; the page unpacks it.
    script = offline.get_plotlyjs().encode()
    packed = gzip.compress(script, mtime=0)
    packed_text = base64.b64encode(packed).decode()
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{names}</title>
<style>
{(_FOLDER / "style.css").read_text()}</style>
</head>
<body>
<h1>{names}</h1>
{body}
<footer>Written by <code>armillary report</code>.</footer>
<script type="text/plain" id="plotly">{packed_text}</script>
<script>
{(_FOLDER / "page.js").read_text()}</script>
</body>
</html>
"""


def _per_run(runs: Sequence[RecordedRun], make: Callable[[RecordedRun], str]) -> str:
    """Returns the parts of a section, each below the name of its run."""
    parts = [make(run) for run in runs]
    if len(runs) == 1 or not any(parts):
        return "".join(parts)

    section = ""
    for run, part in zip(runs, parts, strict=True):
        section += f"<h3>{_text(run.name)}</h3>{part}"
    return section


def _find_record(run: RecordedRun) -> dict[str, Any]:
    """Returns the fields of the first record that have no other place on the page."""
    fields = {key: value for key, value in run.record.items() if key not in _ELSEWHERE}
    for name, number in run.per_device.items():
        unit = next(unit for end, unit in _ENDS.items() if name.endswith(end))
        fields[f"{name}, each device"] = format_scaled(float(number), unit)
    return fields


def _find_configs(runs: Sequence[RecordedRun]) -> list[Mapping[str, Any]]:
    return [run.record.get("config") or {} for run in runs]


def _grid(figures: Iterable[Any]) -> str:
    cells = ""
    for figure in figures:
        figure.update_layout(**_LAYOUT)
        data = _text(figure.to_json())
        cells += f'<div class="chart" data-figure="{data}"></div>'
    return f'<div class="grid">{cells}</div>' if cells else ""


def _draw_curves(runs: Sequence[RecordedRun], plotly: Any) -> Iterator[Any]:
    """Yields a figure for each metric, with training and evaluations on one axis."""
    found_sources: set[str] = set()
    found_metrics: set[str] = set()
    for run in runs:
        for source, metric in run.curves:
            found_sources.add(source)
            found_metrics.add(metric)
    # In all charts, training comes first, and a source always has the same dash. The
    # speeds are the last charts.
    sources = sorted(found_sources, key=lambda source: (source != "train", source))
    metrics = sorted(found_metrics, key=lambda metric: (metric in SPEEDS, metric))
    for metric in metrics:
        yield _draw_curve(runs, sources, metric, plotly)


def _draw_curve(
    runs: Sequence[RecordedRun],
    sources: Sequence[str],
    metric: str,
    plotly: Any,
) -> Any:
    """Draws one metric of several runs, or several sources of one run."""
    figure = plotly.Figure()
    is_alone = len(runs) == 1
    num_hidden = 0
    for number, run in enumerate(runs):
        for index, source in enumerate(sources):
            points = run.curves.get((source, metric), [])
            # A chart of Plotly cannot show infinity or NaN.
            finite = [(step, value) for step, value in points if math.isfinite(value)]
            num_hidden += len(points) - len(finite)
            if not finite:
                continue

            steps, values = zip(*thin_out(finite), strict=True)
            # A color shows a run, or a source if there is only one run.
            number_of_color = index if is_alone else number
            color = _COLORS[number_of_color % len(_COLORS)]
            dash = _DASHES[index % len(_DASHES)]
            # A line does not show a single point.
            has_markers = len(steps) < _FEW_POINTS
            figure.add_scatter(
                x=steps,
                y=values,
                name=source if is_alone else f"{run.name} {source}",
                mode="lines+markers" if has_markers else "lines",
                line={"color": color, "dash": dash, "width": 1.8},
                marker={"size": 5},
            )
            if is_alone and source != "train":
                _mark_extremes(figure, finite)
        # A line for each time that the run was started again.
        for start in run.starts[1:]:
            figure.add_vline(x=start["step"], line={"dash": "dot", "color": "#D55E00"})

    title = metric.replace("_", " ")
    if num_hidden:
        title += f" ({num_hidden} values that are not finite are left out)"
    figure.update_layout(title=title, hovermode="x unified")
    figure.update_xaxes(title_text="step")
    return figure


def _mark_extremes(figure: Any, points: Sequence[tuple[int, float]]) -> None:
    """Labels the lowest and the highest evaluation, in words."""
    first_step, _ = points[0]
    last_step, _ = points[-1]
    for find, word, place in ((min, "lowest", "bottom"), (max, "highest", "top")):
        step, value = find(points, key=lambda point: point[1])
        # The text stays inside of the chart.
        is_in_right_half = 2 * step > first_step + last_step
        side = "left" if is_in_right_half else "right"
        figure.add_scatter(
            x=[step],
            y=[value],
            mode="markers+text",
            text=[f"{word} {value:.4g}"],
            textposition=f"{place} {side}",
            marker={"size": 9, "color": _EXTREMES[word]},
            cliponaxis=False,
            showlegend=False,
            hoverinfo="skip",
        )


def thin_out(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns at most 2,000 points: the lowest and highest one of each stretch."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    most_stretches = _MAX_POINTS // 2
    size = math.ceil(len(points) / most_stretches)
    kept: list[tuple[int, float]] = []
    for begin in range(0, len(points), size):
        stretch = points[begin : begin + size]
        by_value = sorted(stretch, key=lambda point: point[1])
        lowest = by_value[0]
        highest = by_value[-1]
        # A point begins with its step, so this is the order of steps.
        kept += sorted({lowest, highest})
    return kept


def _draw_time(runs: Sequence[RecordedRun], plotly: Any) -> Iterator[Any]:
    """Yields a figure with a bar for each run, divided by the use of its time."""
    known = {run.name: run.goodput.seconds for run in runs if run.goodput}
    if not known:
        return

    longest = max(sum(seconds.values()) for seconds in known.values())
    unit = _choose_unit(longest)
    seconds_per_unit = _UNITS[unit]
    figure = plotly.Figure()
    for category, color in _CATEGORY_COLORS.items():
        times = [seconds[category] / seconds_per_unit for seconds in known.values()]
        # A use that no run has would only take room in the legend.
        if any(times):
            figure.add_bar(
                x=times,
                y=list(known),
                orientation="h",
                name=category.label,
                marker={"color": color, "line": {"width": 0}},
            )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text=unit)
    yield figure


def _choose_unit(longest_seconds: float) -> str:
    """Returns the unit for an axis of times."""
    # With a large unit the ticks are round numbers; with many seconds they are not.
    for unit, size in _UNITS.items():
        if longest_seconds > 2 * size:
            return unit
    return "seconds"


def show_number(value: float | None) -> str:
    """Returns a number with few digits, or an integer with all."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.5g}"


def goodput_cells(run: RecordedRun) -> tuple[str, str, str]:
    """Returns the attempts of a run, its time and its goodput, if they are known."""
    goodput = run.goodput
    if goodput is None:
        return "", "", ""
    attempts = show_number(goodput.num_attempts)
    time = format_seconds(goodput.total_seconds)
    share = f"{goodput.goodput:.1%}"
    return attempts, time, share


def _overview(runs: Sequence[RecordedRun]) -> str:
    """Returns a row for each run: its progress, its time and its last values."""
    found: set[tuple[str, str]] = set()
    for run in runs:
        for source, metric in run.curves:
            if metric not in SPEEDS:
                found.add((source, metric))
    keys = sorted(found)
    # Hyperparameters that are equal in all runs stand in a table of their own.
    configs = _find_configs(runs)
    names = find_differing(configs)

    head = ["run", *names, "began", "step", "state", "attempts", "time", "goodput"]
    head += [f"{source} {metric}" for source, metric in keys]

    rows = []
    for run, config in zip(runs, configs, strict=True):
        row = [_text(run.name)]
        row += [_as_cell(config.get(name)) for name in names]
        row += [format_time(run.began), show_number(run.step), run.state]
        row += goodput_cells(run)
        for key in keys:
            last = None
            points = run.curves.get(key)
            if points:
                _, last = points[-1]
            row.append(show_number(last))
        rows.append(row)
    return _table(head, rows)


def _stragglers(run: RecordedRun) -> str:
    sentences = run.goodput.stragglers if run.goodput else ()
    return "".join(f"<p>{_text(sentence)}</p>" for sentence in sentences)


def _checkpoints(run: RecordedRun) -> str:
    """Returns a row for each checkpoint, with evaluations of its step, and the best."""
    keys = sorted(key for key in run.curves if key[0] != "train")
    value_by_step = [dict(run.curves[key]) for key in keys]
    rows = []
    for checkpoint in run.checkpoints:
        step = checkpoint.number
        row = [show_number(step), format_time(checkpoint.saved_at)]
        row += [show_number(values.get(step)) for values in value_by_step]
        folder = checkpoint.path.relative_to(run.path)
        row.append(_text(folder))
        rows.append(row)

    measured = [f"{source} {metric}" for source, metric in keys]
    table = _table(["step", "saved", *measured, "folder"], rows)
    if run.best is None:
        return table
    return f"{table}<p>{_text(run.best)}</p>"


def _model(run: RecordedRun) -> str:
    """Returns the modules of the model, the largest first."""
    parameters = run.record.get("parameters")
    if not isinstance(parameters, Mapping):
        return "<p>The run has not recorded its model.</p>"
    modules = parameters.get("modules") or []
    whole = {**parameters, "name": "all"}
    rows: list[list[str]] = []
    for size in [*modules, whole]:
        name = _text(size["name"])
        count = show_number(size["count"])
        rows.append([name, count, format_bytes(size["bytes"])])
    return _table(["module", "parameters", "size"], rows)


def _hyperparameters(runs: Sequence[RecordedRun]) -> str:
    """Returns the hyperparameters of the last attempts, and the values before them."""
    configs = _find_configs(runs)
    if not any(configs):
        return ""
    section = _side_by_side(runs, configs)
    for run in runs:
        attempts = [start.get("config") or {} for start in run.starts]
        for name in find_differing(attempts):
            cells = [_as_cell(attempt.get(name)) for attempt in attempts]
            equation = f"{_text(name)} = {', then '.join(cells)}"
            section += f"<p>Attempts of {_text(run.name)} had {equation}.</p>"
    return section


def find_differing(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names whose values are not the same in all records."""
    differing: list[str] = []
    for name in _find_names(records):
        values = {_as_cell(record.get(name)) for record in records}
        if len(values) > 1:
            differing.append(name)
    return differing


def _find_names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names in all records, in the order in which they first appear."""
    names: dict[str, None] = {}
    for record in records:
        names.update(dict.fromkeys(record))
    return list(names)


def _side_by_side(
    runs: Sequence[RecordedRun], records: Sequence[Mapping[str, Any]]
) -> str:
    """Returns a row for each name in some dictionaries, marked if they differ."""
    names = _find_names(records)
    rows = []
    for name in names:
        values = [f"<code>{_as_cell(record.get(name))}</code>" for record in records]
        rows.append([_text(name), *values])
    differing = map(names.index, find_differing(records))
    head = ["", *(run.name for run in runs)]
    return _table(head, rows, differing)


def _table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    differing: Iterable[int] = (),
) -> str:
    """Returns a table of HTML cells, numbers to the right, with some rows marked."""
    columns_of_numbers: set[int] = set()
    for row in rows:
        for index, cell in enumerate(row):
            is_number = cell[:1].isdigit()
            if is_number:
                columns_of_numbers.add(index)

    marked = set(differing)
    titles = [_text(cell) for cell in head]
    lines = _row("th", titles, columns_of_numbers)
    for index, row in enumerate(rows):
        mark = ' class="differs"' if index in marked else ""
        lines += _row("td", row, columns_of_numbers, mark)
    return f'<div class="scroll"><table>{lines}</table></div>'


def _row(
    kind: str,
    cells: Sequence[str],
    columns_of_numbers: set[int],
    mark: str = "",
) -> str:
    """Returns a row of a table, whose cells are of a kind: `"th"` or `"td"`."""
    shown = ""
    for index, cell in enumerate(cells):
        style = "number" if index in columns_of_numbers else "text"
        shown += f'<{kind} class="{style}">{cell}</{kind}>'
    return f"<tr{mark}>{shown}</tr>"


def _text(value: Any) -> str:
    return html.escape(str(value))


def _as_cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return _text(value or "")
    return _text(json.dumps(value, ensure_ascii=False))
