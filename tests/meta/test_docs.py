"""Documents keep their promises: their code runs and their commands exist."""

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
    ]
    if path.name != "CHANGELOG.md"
]
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


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "document"}
    for info, line, body in find_blocks(path):
        if info.split()[:1] != ["python"]:
            continue
        # Blank lines in front make a traceback point into the document.
        code = compile("\n" * line + body, str(path), "exec")
        if info != "python no-run":
            assert info == "python", f"{path.name}:{line}: unknown marks in {info!r}"
            # The layers of Keras rely on the promotion of ranks.
            promotion = "allow" if path.name == "keras.md" else "raise"
            with jax.numpy_rank_promotion(promotion):
                exec(code, namespace)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_make_targets_exist(path):
    targets = re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.M)
    named = re.findall(r"\bmake ([a-z]+)`|^make ([a-z]+)", path.read_text(), re.M)
    assert {"".join(groups) for groups in named} <= set(targets)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_to_files_resolve(path):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    local = [link for link in links if "://" not in link]
    missing = [link for link in local if not (path.parent / link).exists()]
    assert not missing
