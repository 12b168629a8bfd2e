"""Tests of `armillary report` and `armillary runs`, and of their errors."""

import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from armillary.goodput import Category
from armillary.report import _page
from armillary.report._run_files import read_run
from tests.command import run_command
from tests.patience import patience
from tests.report.conftest import make_start, make_train, write_lines


@pytest.fixture
def page(crashed, short, tmp_path):
    """Returns the page of two runs, without the code of Plotly."""
    pytest.importorskip("plotly")
    path = tmp_path / "pages" / "report.html"
    assert run_command(["report", str(crashed), str(short), "--output", str(path)]) == 0
    text = path.read_text()
    assert len(text) < 2 * 2**20
    return re.sub(r'<script type="text/plain".*?</script>', "", text, count=1)


def cells_of(page, title):
    """Returns the rows of the tables below a heading, as text."""
    section = page.split(f"<h2>{title}</h2>")[1].split("<h2>")[0]
    rows = re.findall(r"<tr.*?</tr>", section)
    found = [re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row) for row in rows]
    return [[re.sub(r"<.*?>", "", cell).strip() for cell in row] for row in found]


def test_the_page_compares_runs(page):
    head, first, second = cells_of(page, "Runs")
    # Hyperparameters that differ stand next to the name.
    names = ["run", "rate", "began", "step", "state", "attempts", "time", "goodput"]
    assert head[:8] == names
    assert (*first[:2], *first[3:8]) == (
        "crashed",
        "0.1",
        "40",
        "done",
        "2",
        "1 min 10 s",
        "42.9%",
    )
    assert (*second[:2], *second[3:8]) == ("short", "0.2", "3", "", "", "", "")
    last = dict(zip(head, first, strict=True))
    assert (last["eval loss"], last["eval test accuracy"]) == ("0.3", "0.5")


@pytest.mark.slow
def test_the_page_shows_checkpoints_with_what_was_measured(page):
    rows = cells_of(page, "Checkpoints")
    assert rows[0] == ["step", "saved", "eval loss", "eval test accuracy", "folder"]
    assert [row[0] for row in rows[1:4]] == ["20", "30", "40"]
    assert [row[2] for row in rows[1:4]] == ["0.9", "", "0.3"]
    assert [row[3] for row in rows[1:4]] == ["0.5", "", ""]
    assert rows[3][4] == "checkpoints/checkpoint_40"


def test_the_page_shows_models_and_what_differs(page):
    model = cells_of(page, "Model")
    assert model[1:4] == [
        ["Dense", "30", "120 B"],
        ["&lt;Norm&gt;", "4", "16 B"],
        ["all", "34", "136 B"],
    ]
    config = cells_of(page, "Hyperparameters")
    assert config[1:] == [["rate", "0.1", "0.2"], ["layers", "[2, 3]", "[2, 3]"]]
    assert page.count('<tr class="differs">') == 1
    assert "Attempts of crashed had layers = [2], then [2, 3].</p>" in page
    assert ["jax", "0.10.2", "0.10.2"] in cells_of(page, "Record")


def test_the_page_needs_no_network_and_shows_no_command_line(page):
    assert "train.py" not in page  # It may hold passwords.
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=", page)


@pytest.mark.slow
def test_a_browser_draws_it(crashed, short, tmp_path):
    """All charts are there, and the page reports no error."""
    pytest.importorskip("plotly")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    path = tmp_path / "report.html"
    assert run_command(["report", str(crashed), str(short), "--output", str(path)]) == 0
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    options += ["--disable-background-networking", "--disable-component-update"]
    options += ["--enable-logging=stderr", f"--user-data-dir={tmp_path / 'browser'}"]
    options += ["--virtual-time-budget=5000", "--dump-dom", path.as_uri()]
    ended = subprocess.run(
        [browser, *options],
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=True,
    )
    drawn = re.findall(r'class="main-svg"', ended.stdout)
    titles = re.findall(r'class="gtitle"[^>]*>(.*?)</text>', ended.stdout)
    # Two runs: accuracy, loss, rate and speed; and the time of the one that tells it.
    assert titles == [
        "accuracy",
        "loss (1 values that are not finite are left out)",
        "lr",
        "steps per second",
    ]
    assert len(drawn) >= 5
    assert "lowest" not in ended.stdout  # For several runs, curves are enough.
    assert "Uncaught" not in ended.stderr


def test_the_time_of_runs_that_tell_it_is_drawn_whole(crashed, short):
    graphs = pytest.importorskip("plotly.graph_objects")
    runs = [read_run(crashed), read_run(short)]
    [figure] = _page._draw_time(runs, graphs)
    assert {bar.name: (bar.y, bar.x) for bar in figure.data} == {
        "stepping": (("crashed",), (30.0,)),
        "start-up": (("crashed",), (15.0,)),
        "lost: work done again": (("crashed",), (10.0,)),
        "lost: down between attempts": (("crashed",), (15.0,)),
    }


def test_extremes_differ_in_words_and_colors(crashed):
    graphs = pytest.importorskip("plotly.graph_objects")
    _, loss, *_ = _page._draw_curves([read_run(crashed)], graphs)
    marks = [each for each in loss.data if each.text]
    assert [mark.text for mark in marks] == [("lowest 0.3",), ("highest 0.9",)]
    assert len({mark.marker.color for mark in marks}) == 2


def test_times_have_a_unit_with_round_ticks(short, crashed):
    graphs = pytest.importorskip("plotly.graph_objects")
    run = read_run(crashed)
    seconds = {**run.entries[-1].seconds, Category.STEPPING: 3600.0}
    long = replace(run, entries=(replace(run.entries[-1], seconds=seconds),))
    for one, unit in ((run, "seconds"), (long, "minutes")):
        [figure] = _page._draw_time([one], graphs)
        assert figure.layout.xaxis.title.text == unit


def test_names_from_elsewhere_do_nothing_to_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    name = "\x1b[2J[red]a&b\udcff"
    run = tmp_path / name
    metric = {
        "record": "train",
        "time": 1.0,
        "step": 1,
        "values": {"\x1b[2J[/nope]": 0.5},
    }
    write_lines(run / "metrics.jsonl", [make_start(1.0, 0), metric])
    assert run_command(["runs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    shown = r"\x1b[2J[red]a&b\udcff"
    assert shown in printed and r"train \x1b[2J[/nope] 0.5" in printed
    pytest.importorskip("plotly")
    page = tmp_path / "report.html"
    assert run_command(["report", str(run), "--output", str(page)]) == 0
    assert capsys.readouterr().out == f"{page} shows {shown}.\n"
    assert r"[red]a&amp;b\udcff</h1>" in page.read_text()


def test_long_curves_keep_their_extremes():
    points = [(step, float(step % 1000)) for step in range(100_000)]
    points[54_321] = 54_321, -5.0
    thin = _page.thin_out(points)
    assert len(thin) <= 2000
    assert (54_321, -5.0) in thin
    assert thin == sorted(thin)


def test_runs_as_a_table_and_as_json(crashed, short, tmp_path, capsys):
    assert run_command(["runs", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    # A line each: what was evaluated first, and what follows as far as it fits.
    assert re.search(
        r"crashed .* done .* 40 .* 1 min 10 s .* 42.9% .* eval .* \.\.\.", table
    )
    assert re.search(r"short .* 3 ", table)
    lines = table.splitlines()
    assert len(lines) == 6 and len(max(lines, key=len)) <= 100
    with open(short / "metrics.jsonl", "a") as file:
        json.dump(make_train(2004.0, 4, "NaN"), file)
    assert run_command(["runs", str(tmp_path), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["run"], first["step"], first["attempts"]) == ("crashed", 40, 2)
    assert first["values"]["eval test/accuracy"] == 0.5
    assert (second["state"], second["goodput"]) == (None, None)
    assert second["values"]["train/loss"] == "NaN"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "nowhere"], "`nowhere` is not a directory with a `metrics.jsonl`"),
        (["runs", "README.md"], "`README.md` is not a directory with"),
        (["runs", "docs"], "`docs` is not a directory with a `metrics.jsonl` in it or"),
        (["report", "docs", "--output", "docs"], "name of a file. Use `--output rep"),
        (
            ["report", "docs", "--output", "README.md/x.html"],
            "is not a directory in which",
        ),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
