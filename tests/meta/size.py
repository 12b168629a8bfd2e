"""Prints the size and the density of each package: `make size`.

The columns are

- files and lines,
- tokens of code, without comments, docstrings and line ends,
- tokens per line of code,
- tuple assignments per 1,000 lines of code that give unrelated values to several names
  (`a, b = x, y`, except a swap),
- lines of comments, in percent of all lines,
- first lines of docstrings that have "what" in place of a noun.

They are no gate. A table before and after a change shows whether code became denser.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "armillary"
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_HEADER = (
    f"{'package':22}{'files':>6}{'lines':>8}{'tokens':>9}{'per line':>9}"
    f"{'tuples':>8}{'comments':>10}{'what':>6}"
)


@dataclass
class Size:
    """The figures of one file, or the sums of several files."""

    files: int = 0
    lines: int = 0
    code_lines: int = 0
    tokens: int = 0
    tuples: int = 0
    comments: int = 0
    whats: int = 0

    def add(self, other: "Size") -> None:
        for field in fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)

    def row(self, name: str) -> str:
        code_lines = self.code_lines or 1
        return (
            f"{name:22}{self.files:6}{self.lines:8,}{self.tokens:9,}"
            f"{self.tokens / code_lines:9.2f}{1000 * self.tuples / code_lines:8.1f}"
            f"{100 * self.comments / (self.lines or 1):9.1f}%{self.whats:6}"
        )


def main() -> None:
    sizes: dict[str, Size] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        package = place.parts[0] if len(place.parts) > 1 else "(files)"
        sizes.setdefault(package, Size()).add(measure(path.read_text()))
    total = Size()
    rows: list[str] = []
    for package, size in sizes.items():
        total.add(size)
        rows.append(size.row(package))
    sys.stdout.write("\n".join([_HEADER, *rows, total.row("all"), ""]))


def measure(source: str) -> Size:
    """Returns the figures of the text of one file."""
    tree = ast.parse(source)
    docstrings = set(_lines_of_docstrings(tree))
    code_lines: set[int] = set()
    num_tokens = 0
    num_comments = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        is_own_comment = token.type == tokenize.COMMENT and (
            token.line.lstrip().startswith("#")
        )
        num_comments += is_own_comment
        if token.type not in _LAYOUT and line not in docstrings:
            num_tokens += 1
            code_lines.update(range(line, token.end[0] + 1))
    return Size(
        files=1,
        lines=len(source.splitlines()),
        code_lines=len(code_lines),
        tokens=num_tokens,
        tuples=sum(map(_is_unrelated, ast.walk(tree))),
        comments=num_comments,
        whats=sum(" what " in f" {each.lower()} " for each in _first_lines(tree)),
    )


def _docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            assert isinstance(docstring, ast.Expr)
            yield docstring


def _lines_of_docstrings(tree: ast.AST) -> Iterator[int]:
    for docstring in _docstrings(tree):
        yield from range(docstring.lineno, (docstring.end_lineno or 0) + 1)


def _first_lines(tree: ast.AST) -> Iterator[str]:
    for docstring in _docstrings(tree):
        assert isinstance(docstring.value, ast.Constant)
        yield str(docstring.value.value).strip().splitlines()[0]


def _is_unrelated(node: ast.AST) -> bool:
    """Returns whether a statement assigns several values that it does not exchange."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    names = {ast.unparse(each) for each in target.elts}
    values = {ast.unparse(each) for each in node.value.elts}
    return names != values


if __name__ == "__main__":
    main()
