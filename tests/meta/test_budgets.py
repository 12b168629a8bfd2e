"""The library stays small: each room, each file and the whole keep their budgets."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUDGETS = tomllib.loads(Path(__file__).with_name("budgets.toml").read_text())


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def find_files() -> dict[str, list[Path]]:
    """Returns the files of each room: the longest listed folder that they are in."""
    rooms: dict[str, list[Path]] = {name: [] for name in BUDGETS["rooms"]}
    for path in sorted((ROOT / "armillary").rglob("*.py")):
        folder = path.parent.relative_to(ROOT)
        room = next(str(f) for f in (folder, *folder.parents) if str(f) in rooms)
        rooms[room].append(path)
    return rooms


def test_rooms_keep_their_budgets():
    over = []
    for room, files in find_files().items():
        lines, budget = sum(map(count_lines, files)), BUDGETS["rooms"][room]
        if lines > budget["lines"] or len(files) > budget["files"]:
            over.append(f"{room}: {lines} lines in {len(files)} files, not {budget}")
    assert not over, (
        "Make room first, or lower another budget and say why in budgets.toml:\n  "
        + "\n  ".join(over)
    )


def test_files_keep_theirs():
    known = BUDGETS["files"]
    sizes = {
        str(path.relative_to(ROOT)): count_lines(path)
        for files in find_files().values()
        for path in files
    }
    over = {
        name: lines
        for name, lines in sizes.items()
        if lines > known.get(name, BUDGETS["most_lines_of_a_file"])
    }
    assert not over
    assert known.keys() <= sizes.keys()


def test_the_budgets_of_rooms_are_within_the_total():
    rooms, total = BUDGETS["rooms"].values(), BUDGETS["total"]
    assert sum(room["lines"] for room in rooms) <= total["lines"]
    assert sum(room["files"] for room in rooms) <= total["files"]
