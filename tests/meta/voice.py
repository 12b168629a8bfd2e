"""Counts words that read as translated: in documents, docstrings, comments, messages.

`make check` prints the counts as a warning, and never fails. Name files to see lines::

    python tests/meta/voice.py docs/data/index.md armillary/errors.py
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("armillary", "benchmarks", "docs/site", "examples", "tests")
# Files of the project that `armillary new` writes.
TEMPLATE = ".tmpl"
# Files other than modules whose comments count.
WITH_COMMENTS = ("Makefile", "pyproject.toml", ".ci/run", ".github/workflows/*.yml")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# A sentence begins after a blank line, a bullet, a cell of a table, or a full stop.
_BEGINNING = r"(?:\A|\n\s*\n|(?:\A|\n)\s*(?:[-*]|\d+\.|\#+)\s|\|\s|[.!?:]\s)[\s*]*"
# A question may begin with "What".
_NO_QUESTION = r"(?![^.!?]*\?)"
STARTS = ("That of", "Those", "Whoever", "What", "Of")
PHRASES = ("that of", "those of", "anew", "beside", "but for", "goes on")
AT_BEGINNING = {"that of": "That of ...", "those of": "Those ..."}
# A summary begins with a verb or a noun: "Which worker failed first" is neither.
SUMMARY_STARTS = ("Has", "How", "Where", "Whether", "Which", "Who")
RULES = {
    f"{word} ...": re.compile(rf"{_BEGINNING}(?P<hit>{word})\s{_NO_QUESTION}")
    for word in STARTS
}
for _phrase in PHRASES:
    _words = _phrase.replace(" ", r"\s+")
    RULES[_phrase] = re.compile(rf"\b(?P<hit>{_words})\b", re.IGNORECASE)

_SUMMARY = re.compile(rf"\s*(?P<hit>{'|'.join(SUMMARY_STARTS)})\s{_NO_QUESTION}")

_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(`+)[^`]+\1")
_TARGET = re.compile(r"\]\([^)]*\)")


def _hide(match: re.Match[str]) -> str:
    """Returns a placeholder with as many lines as the code, to keep line numbers."""
    return "code" + "\n" * match[0].count("\n")


def find_phrases(text: str) -> list[tuple[int, str]]:
    """Returns line number and rule of each hit in a text; code in it does not count."""
    for code in (_FENCE, _CODE, _TARGET):
        text = code.sub(_hide, text)
    hits = [
        (text.count("\n", 0, match.start("hit")) + 1, name)
        for name, rule in RULES.items()
        for match in rule.finditer(text)
    ]
    # `That of` at the beginning of a sentence breaks two rules, and counts once.
    return sorted(
        (line, name)
        for line, name in hits
        if (line, AT_BEGINNING.get(name)) not in hits
    )


def find_docstrings(tree: ast.AST) -> set[ast.expr]:
    """Returns the docstrings of a module and the strings under an attribute."""
    bodies = [
        node.body
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
    ]
    return {
        node.value for body in bodies for node in body if isinstance(node, ast.Expr)
    }


def find_summaries(source: str) -> list[tuple[int, str]]:
    """Returns line number and rule of each docstring whose summary is a clause."""
    return [
        (node.lineno, f"summary: {match['hit']} ...")
        for node in find_docstrings(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (match := _SUMMARY.match(node.value))
    ]


def find_test_names(source: str) -> list[tuple[int, str]]:
    """Returns line number and rule of each name of a test that has a bad phrase."""
    return [
        (node.lineno, f"test: {rule}")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, FUNCTIONS) and node.name.startswith("test_")
        for _, rule in find_phrases(node.name.removeprefix("test_").replace("_", " "))
    ]


def find_texts(source: str, *, has_messages: bool) -> Iterator[tuple[int, str]]:
    """Yields line number and text of the docstrings and the messages of a module."""
    tree = ast.parse(source)
    docstrings = find_docstrings(tree)
    parts: set[ast.expr] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts.update(node.values)
            values = [getattr(part, "value", "") for part in node.values]
            text = "".join(v if isinstance(v, str) else "`code`" for v in values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        # The parts of an f-string come after it, and are a part of its text.
        if node not in parts and (has_messages or node in docstrings):
            yield node.lineno, text


def find_comments(source: str) -> list[tuple[int, str]]:
    """Returns line number and text of each comment; lines in a row are one comment."""
    found: list[tuple[int, str]] = []
    next_line = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        text = token.string.lstrip("# ")
        is_alone = token.line.lstrip().startswith("#")
        if is_alone and line == next_line:
            first, before = found.pop()
            found.append((first, f"{before}\n{text}"))
        else:
            found.append((line, text))
        next_line = line + 1 if is_alone else 0
    return found


def find_lines_of_comments(source: str) -> list[tuple[int, str]]:
    """Returns the comments of a Makefile, a script or settings, as `find_comments`."""
    lines = source.splitlines()
    # Everything else becomes blank, so that Python can read the comments.
    return find_comments(
        "\n".join(x.lstrip() if x.lstrip().startswith("#") else "" for x in lines)
    )


def find_in_comments(comments: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Returns line number and rule of each hit in comments."""
    return [
        (first + line - 1, rule)
        for first, text in comments
        for line, rule in find_phrases(text)
    ]


def find_in_file(path: Path) -> list[tuple[int, str]]:
    """Returns line number and rule of each hit in a document or a module."""
    source = path.read_text()
    name = path.name.removesuffix(TEMPLATE)
    if name.endswith(".md"):
        return find_phrases(source)
    if not name.endswith(".py"):
        return find_in_comments(find_lines_of_comments(source))
    has_messages = path.is_relative_to(REPOSITORY / "armillary")
    hits = [
        (first + line - 1, rule)
        for first, text in find_texts(source, has_messages=has_messages)
        for line, rule in find_phrases(text)
    ]
    hits += find_in_comments(find_comments(source))
    return hits + find_summaries(source) + find_test_names(source)


def list_files() -> list[Path]:
    """Returns the documents, the modules, the templates of a project, and scripts."""
    documents = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
    documents += [
        REPOSITORY / name / "README.md" for name in ("benchmarks", "examples", "tests")
    ]
    modules = [path for name in FOLDERS for path in REPOSITORY.glob(f"{name}/**/*.py")]
    templates = REPOSITORY.glob(f"armillary/**/*{TEMPLATE}")
    scripts = [path for name in WITH_COMMENTS for path in REPOSITORY.glob(name)]
    return [
        path
        for paths in (documents, modules, templates, scripts)
        for path in sorted(paths)
    ]


def show_counts() -> str:
    """Returns a line for each file with hits, the most hits first, and the total."""
    lines: list[tuple[int, str]] = []
    for path in list_files():
        counts = Counter(name for _, name in find_in_file(path))
        if counts:
            parts = ", ".join(
                f"{count} {name!r}" for name, count in counts.most_common()
            )
            name = path.relative_to(REPOSITORY).as_posix()
            lines.append((counts.total(), f"{counts.total():4} {name}: {parts}"))
    total = sum(count for count, _ in lines)
    shown = [line for _, line in sorted(lines, key=lambda each: -each[0])]
    last = f"warning: {total} phrases that read as translated, in {len(lines)} files"
    return "\n".join([*shown, last])


def main(names: list[str]) -> None:
    """Prints each hit in the named files, or the counts of all files."""
    hits = [
        f"{name}:{line}: {rule}"
        for name in names
        for line, rule in sorted(find_in_file(Path(name).resolve()))
    ]
    text = "\n".join(hits) if names else show_counts()
    sys.stdout.write(f"{text}\n" if text else "")


if __name__ == "__main__":
    main(sys.argv[1:])
