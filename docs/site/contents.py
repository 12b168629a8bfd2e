"""The contents of the site, as the tables of some pages list them.

These pages are read on GitHub too, so their tables are the contents. Each heading over
a table of `docs/index.md` is a part of the sidebar, and each row whose first cell is a
link is a page. The pages that another page lists are below it in the sidebar. A list of
one page is a sentence instead of a table: "[Title](page.md) explains ...".
"""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LISTS = (
    "docs/index.md",
    "docs/advanced/estimator.md",
    "docs/advanced/parameter_server.md",
    "docs/checkpoints/index.md",
    "docs/data/index.md",
    "docs/devices/plan.md",
    "docs/devices/sharding.md",
    "docs/devices/strategies.md",
    "docs/internals/index.md",
    "docs/keras/index.md",
    "docs/logs/summaries.md",
    "docs/long_runs/performance.md",
    "docs/long_runs/watching.md",
    "docs/machines/cluster.md",
    "docs/machines/launch.md",
    "docs/migrate/from_keras_or_lightning.md",
    "docs/migrate/from_plain_jax.md",
    "docs/migrate/from_tensorflow.md",
    "docs/recipes/index.md",
    "docs/train/controller.md",
    "docs/train/errors.md",
    "docs/train/metrics.md",
    "docs/train/trainer.md",
)

_HEADING = re.compile(r"^## (.+)$")
_FILE = re.compile(r"\]\(([^)#\s:]+\.(?!md\b)\w+)\)")
_ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)#]+\.md)\) \| (.+) \|$")
_SENTENCE = re.compile(r"^\[([^\]]+)\]\(([^)#/]+\.md)\) (?:explains|shows) (.+)\.$")


def read_entry(line: str) -> tuple[str, str, str] | None:
    """Returns the title, the link and the description of the page that `line` lists."""
    entry = _ROW.match(line) or _SENTENCE.match(line)
    return (entry[1], entry[2], entry[3]) if entry else None


def read_contents(page: str) -> dict[str, list[str]]:
    """Returns the pages that `page` lists, by the heading that they stand under.

    Args:
        page: A path in the repository, as those returned are.
    """
    parts: dict[str, list[str]] = {}
    caption = ""
    for line in (REPOSITORY / page).read_text().splitlines():
        if heading := _HEADING.match(line):
            caption = heading[1]
        elif entry := read_entry(line):
            target = (REPOSITORY / page).parent / entry[1]
            name = target.resolve().relative_to(REPOSITORY).as_posix()
            parts.setdefault(caption, []).append(name)
    return parts


def make_toctree(caption: str, pages: list[str]) -> str:
    """Returns what lists pages, without their suffix, in the sidebar."""
    lines = ["```{toctree}", ":hidden:"]
    lines += [f":caption: {caption}", ""] if caption else [""]
    lines += [f"/{page.rpartition('.')[0]}" for page in pages]
    return "\n".join(["", "", *lines, "```", ""])


def list_below(page: str) -> list[str]:
    """Returns the pages below `page` in the sidebar: none, unless it is a list."""
    if page not in LISTS:
        return []
    return [name for pages in read_contents(page).values() for name in pages]


def list_pages() -> list[str]:
    """Returns the pages in the order of the sidebar, without the reference."""
    listed = [LISTS[0]]
    for page in list_below(LISTS[0]):
        listed += [page, *list_below(page)]
    return listed


def find_linked_files() -> list[Path]:
    """Returns the files that pages link to and that are no pages themselves."""
    files = set()
    for page in list_pages():
        path = REPOSITORY / page
        for link in _FILE.findall(path.read_text()):
            files.add((path.parent / link).resolve())
    return sorted(path for path in files if path.suffix != ".svg")
