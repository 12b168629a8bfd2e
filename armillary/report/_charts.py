"""The charts of the page, as Plotly's figures.

Colors of text and grids belong to the page, which has a light and a dark one.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from armillary.goodput._goodput import Span, find_spans
from armillary.goodput._stopwatch import Category
from armillary.report._run_files import SPEED, Run

LAYOUT = {
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
# After Okabe and Ito (https://jfly.uni-koeln.de/color), which all people tell apart;
# the blue is lighter, for dark pages.
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
_DASHES = ("solid", "dash", "dot", "dashdot")
_UNITS = ((1.0, "seconds"), (60.0, "minutes"), (3600.0, "hours"))
_MARK = {"width": 1.5, "dash": "dot", "color": "#D55E00"}
_MOST_POINTS = 2000
_MOST_BINS = 120
_FEW_POINTS = 60


def draw_curves(runs: Sequence[Run], plotly: Any) -> Iterator[Any]:
    """Yields a figure for each metric, with training and evaluations on one axis."""
    for name in sorted({metric for run in runs for _, metric in run.curves} - {SPEED}):
        yield _draw(runs, name, plotly)


def draw_speed(runs: Sequence[Run], plotly: Any) -> Iterator[Any]:
    """Yields the figure of steps per second, if any run has recorded them."""
    if any(metric == SPEED for run in runs for _, metric in run.curves):
        figure = _draw(runs, SPEED, plotly)
        figure.update_yaxes(rangemode="tozero")
        yield figure


def draw_time(run: Run, plotly: Any) -> Iterator[Any]:
    """Yields what the time of a run was spent on, as shares of each moment."""
    spans = find_spans(run.entries)
    if not spans:
        return
    begin, end = spans[0].begin, spans[-1].end
    count = max(1, min(_MOST_BINS, len(spans)))
    width = max(end - begin, 1e-6) / count
    bins = _spread(spans, begin, width, count)
    fitting = (each for each in _UNITS if end - begin < 180 * each[0])
    unit, name = next(fitting, _UNITS[-1])
    figure = plotly.Figure()
    for category, color in _CATEGORY_COLORS.items():
        shares = [each.get(category, 0.0) / width for each in bins]
        if any(shares):
            figure.add_bar(
                x=[(i + 0.5) * width / unit for i in range(count)],
                y=shares,
                width=width / unit,
                name=category.label,
                marker={"color": color, "line": {"width": 0}},
                hovertemplate="%{y:.0%}",
            )
    running = [span for span in spans if Category.DOWN not in span.seconds]
    for one, other in itertools.pairwise(running):
        if other.attempt != one.attempt:
            figure.add_vline(x=(other.begin - begin) / unit, line=_MARK)
    figure.update_layout(barmode="stack", bargap=0, hovermode="x unified")
    title = f"{name} since the start"
    figure.update_xaxes(title=title, range=[0, (end - begin) / unit])
    figure.update_yaxes(tickformat=".0%", range=[0, 1])
    yield figure


def _spread(
    spans: Iterable[Span], begin: float, width: float, count: int
) -> list[dict[Category, float]]:
    """Returns the seconds of each category in each of some equal parts of the time."""
    bins: list[dict[Category, float]] = [{} for _ in range(count)]
    for span in spans:
        length = span.end - span.begin
        if length <= 0:
            continue
        first = max(0, min(count - 1, int((span.begin - begin) / width)))
        last = max(0, min(count - 1, int((span.end - begin) / width)))
        for index in range(first, last + 1):
            start = begin + index * width
            overlap = min(span.end, start + width) - max(span.begin, start)
            share = max(overlap, 0.0) / length
            for category, seconds in span.seconds.items():
                known = bins[index].get(category, 0.0)
                bins[index][category] = known + seconds * share
    return bins


def _draw(runs: Sequence[Run], metric: str, plotly: Any) -> Any:
    figure = plotly.Figure()
    # Training first, and a dash for each source, in all charts.
    sources = sorted(
        {source for run in runs for source, _ in run.curves},
        key=lambda source: (source != "train", source),
    )
    num_hidden = 0
    for number, run in enumerate(runs):
        for index, source in enumerate(sources):
            points = run.curves.get((source, metric), [])
            finite = [(step, value) for step, value in points if math.isfinite(value)]
            num_hidden += len(points) - len(finite)
            if not finite:
                continue
            steps, values = zip(*thin_out(finite), strict=True)
            color = _COLORS[(number if len(runs) > 1 else index) % len(_COLORS)]
            figure.add_scatter(
                x=steps,
                y=values,
                name=source if len(runs) == 1 else f"{run.name} {source}",
                mode="lines+markers" if len(steps) < _FEW_POINTS else "lines",
                line={"color": color, "dash": _DASHES[index % 4], "width": 1.8},
                marker={"size": 5},
            )
        for start in run.starts[1:]:
            figure.add_vline(x=start["step"], line=_MARK)
    title = metric.replace("_", " ")
    if num_hidden:
        title += f" ({num_hidden} values that are not finite are left out)"
    figure.update_layout(title=title)
    figure.update_xaxes(title="step")
    return figure


def thin_out(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns at most some thousand points: of each stretch the lowest and highest."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = math.ceil(len(points) / (_MOST_POINTS // 2))
    kept: list[tuple[int, float]] = []
    for begin in range(0, len(points), size):
        stretch = sorted(points[begin : begin + size], key=lambda point: point[1])
        kept += sorted({stretch[0], stretch[-1]})
    return kept
