"""The page: tables and charts of one run or of several, in one file."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from armillary.report._charts import draw_curves, draw_speed, draw_time
from armillary.report._run_files import Run
from armillary.report._tables import (
    checkpoints,
    model,
    overview,
    record_of,
    side_by_side,
    text,
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


def make_page(runs: Sequence[Run]) -> str:
    """Returns the page of some runs, as HTML that needs no network."""
    graphs, offline = _import_plotly()
    names = ", ".join(text(run.name) for run in runs)
    curves = draw_curves(runs, graphs)
    speed = draw_speed(runs, graphs)
    figures = [*curves.values(), *([] if speed is None else [speed])]
    times = {run.name: draw_time(run, graphs) for run in runs}
    charts = [(name, figure) for name, figure in times.items() if figure is not None]
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
        "Record": side_by_side(runs, [record_of(run) for run in runs]),
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


def _import_plotly() -> tuple[Any, Any]:
    """Returns Plotly's figures, and what makes HTML of them."""
    try:
        import plotly.graph_objects
        import plotly.offline
    except ImportError as error:
        raise ImportError(
            "`armillary report` draws with Plotly, which is not installed. Install it "
            'with `pip install "armillary[report]"`.'
        ) from error
    return plotly.graph_objects, plotly.offline


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
