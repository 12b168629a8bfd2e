"""Looks at one installed library, in the environment that has it.

    python -m benchmarks.peers.footprint DISTRIBUTION MODULE [NAME ...]

It imports the module, reads the names, and prints one line of JSON. It needs the
standard library and `pip` only.
"""

import importlib
import json
import re
import sys
import time
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any


def main() -> None:
    """Prints the record of a library."""
    name, module, *attributes = sys.argv[1:]
    before = len(sys.modules)
    start = time.perf_counter()
    imported = importlib.import_module(module)
    for attribute in attributes:
        getattr(imported, attribute)
    record = {
        "import_seconds": time.perf_counter() - start,
        "num_modules": len(sys.modules) - before,
    }
    sys.stdout.write(json.dumps({**record, **measure_files(name, imported)}) + "\n")


def measure_files(name: str, module: Any) -> dict[str, Any]:
    """Returns the version, the bytes and the number of dependencies of a library."""
    own = distribution(name)
    own_bytes = count_bytes(own) or count_folder(module)
    others = [each for each in find_closure(name).values() if each is not None]
    return {
        "version": own.version,
        "own_bytes": own_bytes,
        "all_bytes": own_bytes + sum(map(count_bytes, others)),
        "num_dependencies": len(others),
    }


def find_closure(name: str) -> dict[str, Distribution | None]:
    """Returns the installed distributions that one requires, also through others."""
    found: dict[str, Distribution | None] = {}
    waiting = [*find_required(distribution(name), frozenset())]
    own = normalize(name)
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        key = waiting.pop()
        if key in seen:
            continue
        seen.add(key)
        required, extras = key
        if required != own and required not in found:
            try:
                found[required] = distribution(required)
            except PackageNotFoundError:
                found[required] = None
        required_from = found.get(required)
        if required_from is not None:
            waiting += find_required(required_from, extras)
    return found


def find_required(
    of: Distribution, extras: frozenset[str]
) -> Iterator[tuple[str, frozenset[str]]]:
    """Yields the names that a distribution requires here, each with its extras."""
    from pip._vendor.packaging.requirements import Requirement

    for text in of.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        is_needed = marker is None or any(
            marker.evaluate({"extra": extra}) for extra in ("", *extras)
        )
        if is_needed:
            yield normalize(requirement.name), frozenset(requirement.extras)


def normalize(name: str) -> str:
    """Returns the name of a distribution as all tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def count_bytes(of: Distribution) -> int:
    """Returns the bytes of its files; 0 if it is installed in place (editable)."""
    total = 0
    folder = of.read_text("direct_url.json") or ""
    if '"editable": true' in folder or '"editable":true' in folder:
        return 0
    for file in of.files or ():
        path = Path(str(of.locate_file(file)))
        if path.suffix != ".pyc" and path.is_file():
            total += path.stat().st_size
    return total


def count_folder(module: Any) -> int:
    """Returns the bytes of the files in the folder of a module."""
    files = Path(module.__file__).parent.rglob("*")
    return sum(
        path.stat().st_size
        for path in files
        if path.is_file() and path.suffix != ".pyc"
    )


if __name__ == "__main__":
    main()
