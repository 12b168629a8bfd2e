"""Documents keep their promises: code prints what they show, and commands exist."""

import re
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
WITH_KERAS = ("keras.md", "from_tensorflow.md", "parameter_server.md")
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


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def find_missing(printed: str, shown: str) -> list[str]:
    """Returns printed lines that a page does not show; `...` there is any text."""
    rules = [re.escape(line).replace(r"\.\.\.", ".*") for line in shown.splitlines()]
    return [
        line
        for line in printed.splitlines()
        if not any(re.fullmatch(rule, line) for rule in rules)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_python_blocks_run_and_print_what_the_page_shows(
    path, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "document"}
    printed = ""
    for info, line, body in find_blocks(path):
        if info == "text":
            assert find_missing(printed, body) == [], f"{path.name}:{line}"
            # Other pages show what is logged, too.
            is_whole = len(printed.splitlines()) == len(body.splitlines())
            assert is_whole or path.name != "errors.md", f"errors.md:{line}"
        printed = ""
        if info.split()[:1] != ["python"]:
            continue
        # Blank lines in front make a traceback point into the document.
        code = compile("\n" * line + body, str(path), "exec")
        if info != "python no-run":
            assert info == "python", f"{path.name}:{line}: unknown marks in {info!r}"
            capsys.readouterr()
            # The layers of Keras rely on the promotion of ranks.
            promotion = "allow" if path.name in WITH_KERAS else "raise"
            monkeypatch.setenv("JAX_NUMPY_RANK_PROMOTION", promotion)  # for workers
            with jax.numpy_rank_promotion(promotion):
                exec(code, namespace)
            printed = capsys.readouterr().out


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_make_targets_exist(path):
    targets = re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.M)
    named = re.findall(r"\bmake ([a-z]+)`|^make ([a-z]+)", path.read_text(), re.M)
    assert {"".join(groups) for groups in named} <= set(targets)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_and_tests_that_are_named_exist(path):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    local = [link for link in links if "://" not in link]
    missing = [link for link in local if not (path.parent / link).exists()]
    named = re.findall(r"\btests/[\w/]+\.py\b", path.read_text())
    assert not missing + [name for name in named if not (REPOSITORY / name).exists()]
