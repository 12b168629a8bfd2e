"""Tests that the code on pages prints what they show, and their links exist."""

import logging
import re
import warnings
from pathlib import Path

import jax
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    path
    for path in [
        *sorted(REPOSITORY.glob("*.md")),
        *sorted(REPOSITORY.glob("docs/**/*.md")),
        *sorted(REPOSITORY.glob("examples/*.md")),
    ]
    if path.name != "CHANGELOG.md"
]
# Pages that are read in the repository only.
READMES = [REPOSITORY / "benchmarks" / "README.md", REPOSITORY / "tests" / "README.md"]
WITH_KERAS = (
    "docs/keras/controller.md",
    "docs/keras/custom_loop.md",
    "docs/keras/index.md",
    "docs/keras/orbit.md",
    "docs/migrate/custom_training.md",
    "docs/migrate/from_tensorflow.md",
    # Workers of Ray keep the environment of the page that starts it.
    "docs/advanced/parameter_server.md",
    "docs/advanced/parameter_server_keras.md",
    "docs/advanced/scheduled_functions.md",
)
# Packages that a page needs, and that are not installed with Armillary.
NEEDED = {"docs/recipes/quantization.md": "qwix"}
# A line of a log whose numbers are the same on each machine, except the speed.
OF_A_LOOP = re.compile(r"\s?(?:train|eval) \| step:.*")
OF_A_RUN = re.compile(rf"{OF_A_LOOP.pattern}|each device: .*")
FIRST_LINE = re.compile(r"^train \| step: +\d+ \| training until", re.M)
# The rest of these lines depends on the devices of the machine.
AT_THE_START = ("devices: ", "parameters: ", "batch: ")
MAX_WIDTH = 100
GENERATED = ("compatibility.md", "tensorflow_names.md")
BREAK = re.compile(r"\s*(?:[-*] |\d+\. )?[^\s*-]\S* ")
NO_PROSE = re.compile(r"\s*(?:\||#|!\[|<)")
SPEED = re.compile(r"\b(?:steps/sec|eval time): +\d")
FENCE = re.compile(
    r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE
)


def find_blocks(path: Path) -> list[tuple[str, int, str]]:
    """Returns the fenced blocks of a document: info line, line number, body."""
    text = path.read_text()
    return [
        (match["info"].strip(), text.count("\n", 0, match.start()) + 1, match["body"])
        for match in FENCE.finditer(text)
    ]


def find_wide_lines(text: str) -> list[str]:
    """Returns the lines of prose that are longer than they need to be."""
    wide = []
    is_code = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        is_prose = not is_code and not NO_PROSE.match(line)
        if is_prose and len(line) > MAX_WIDTH and BREAK.match(line[:MAX_WIDTH]):
            wide.append(line)
    return wide


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def make_rule(line: str) -> re.Pattern[str]:
    """Returns the pattern of a line that a page shows; `...` there is any text."""
    return re.compile(re.escape(line).replace(r"\.\.\.", ".*"))


def find_missing(printed: str, shown: str) -> list[str]:
    """Returns printed lines that a page does not show."""
    rules = [make_rule(line) for line in shown.splitlines()]
    return [
        line
        for line in printed.splitlines()
        if not any(rule.fullmatch(line) for rule in rules)
    ]


def find_stale(shown: str, logged: str) -> list[str]:
    """Returns lines of loops that a page shows, and that were not logged."""
    lines = [line for line in shown.splitlines() if OF_A_LOOP.fullmatch(line)]
    printed = logged.splitlines()
    return [
        line
        for line in lines
        if not any(make_rule(line).fullmatch(each.rstrip()) for each in printed)
    ]


def find_unshown(shown: str, logged: str) -> list[str]:
    """Returns logged lines of a run that a page leaves out without `...`."""
    if not FIRST_LINE.search(shown) or "..." in shown.splitlines():
        return []
    lines = [line.rstrip() for line in logged.splitlines()]
    of_a_run = [line for line in lines if OF_A_RUN.fullmatch(line)]
    begun = [start for start in AT_THE_START if f"\n{start}" in f"\n{logged}"]
    unshown = [start for start in begun if f"\n{start}" not in f"\n{shown}"]
    return unshown + find_missing("\n".join(of_a_run), shown)


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_python_blocks_run_and_print_what_the_page_shows(
    path, tmp_path, monkeypatch, capsys, caplog
):
    if name_of(path) in NEEDED:
        pytest.importorskip(NEEDED[name_of(path)])
        # Qwix 0.1.8 calls methods of Flax that a later release will not have.
        warnings.simplefilter("ignore", DeprecationWarning)
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, logger="armillary")
    namespace: dict[str, object] = {"__name__": "document"}
    printed = ""
    has_run = False
    for info, line, body in find_blocks(path):
        if info == "text":
            if has_run:
                logged = "\n".join(caplog.messages)
                assert find_stale(body, logged) == [], f"{path.name}:{line}"
                # `test_readme.py` runs the README on as many devices as it shows.
                if name_of(path) != "README.md":
                    assert find_unshown(body, logged) == [], f"{path.name}:{line}"
            assert find_missing(printed, body) == [], f"{path.name}:{line}"
            # Other pages show what is logged, too.
            is_whole = len(printed.splitlines()) == len(body.splitlines())
            assert is_whole or path.name != "mistakes.md", f"mistakes.md:{line}"
        printed = ""
        if info.split()[:1] != ["python"]:
            has_run = False
            continue
        # Blank lines in front make a traceback point into the document.
        code = compile("\n" * line + body, str(path), "exec")
        has_run = info != "python no-run"
        if has_run:
            caplog.clear()
            assert info == "python", f"{path.name}:{line}: unknown marks in {info!r}"
            capsys.readouterr()
            # The layers of Keras rely on the promotion of ranks.
            promotion = "allow" if name_of(path) in WITH_KERAS else "raise"
            monkeypatch.setenv("JAX_NUMPY_RANK_PROMOTION", promotion)  # for workers
            with jax.numpy_rank_promotion(promotion):
                exec(code, namespace)
            printed = capsys.readouterr().out


def test_a_line_that_was_not_logged_is_stale():
    logged = "devices: 8 x cpu\ntrain | step:    100 | steps/sec:  384.6 | output: {}"
    assert (
        find_stale("train | step:    100 | steps/sec: ... | output: {}", logged) == []
    )
    other = " eval | step:    100 | eval time: ... sec | output: {}"
    assert find_stale(f"devices: 1 x cpu\n{other}", logged) == [other]


def test_a_logged_line_that_a_page_leaves_out_is_found():
    first = "train | step:      0 | training until step 200..."
    logged = f"devices: 8 x cpu\n{first}\neach device: state: 12 B"
    start = f"devices: 1 x cpu\n{first}\n"
    assert find_unshown(start, logged) == ["each device: state: 12 B"]
    assert find_unshown(f"{start}each device: state: ...\n", logged) == []
    assert find_unshown(f"{first}\neach device: ...\n", logged) == ["devices: "]
    assert find_unshown(f"{first}\n...\n", logged) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_no_page_shows_the_speed_of_one_machine(path):
    assert SPEED.findall(path.read_text()) == []


@pytest.mark.parametrize("path", [*DOCUMENTS, *READMES], ids=name_of)
def test_prose_is_wrapped(path):
    if path.name not in GENERATED:
        assert find_wide_lines(path.read_text()) == []


def test_a_wide_line_of_prose_is_found():
    wide = "word " * 21
    code = f"```text\n{wide}\n```"
    address = f"- {'x' * 110}"
    table = f"| {wide} |"
    assert find_wide_lines(f"{wide}\n{code}\n{address}\n{table}") == [wide]


@pytest.mark.parametrize("path", [*DOCUMENTS, *READMES], ids=name_of)
def test_make_targets_exist(path):
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = re.findall(r"^([a-z-]+):", makefile, re.M)
    named = re.findall(r"\bmake ([a-z-]+)`|^make ([a-z-]+)", path.read_text(), re.M)
    assert {"".join(groups) for groups in named} <= set(targets)


@pytest.mark.parametrize("path", READMES, ids=name_of)
def test_paths_of_a_readme_exist(path):
    code = re.findall(r"`([\w/]+(?:/|\.py))`", path.read_text())
    assert code
    assert [each for each in code if not (path.parent / each).exists()] == []


@pytest.mark.parametrize("path", [*DOCUMENTS, *READMES], ids=name_of)
def test_links_and_tests_that_are_named_exist(path):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    local = [link for link in links if "://" not in link]
    missing = [link for link in local if not (path.parent / link).exists()]
    named = re.findall(r"\btests/[\w/]+\.py\b", path.read_text())
    assert not missing + [name for name in named if not (REPOSITORY / name).exists()]
