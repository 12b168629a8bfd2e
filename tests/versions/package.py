"""Checks what `make dist` built: what is inside, and that it works on its own.

The wheel holds the files of the library and no others, and so does the sdist, from
which the wheel was built. An empty environment gets the wheel with what it asks for,
and no checkout; there `armillary new` writes a project, whose commands run as they are
printed (but its tests), and the program of `make demo` runs. Nothing of the library is
imported here::

    python -m tests.versions.package dist
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# Files that a rule of git or hatch could leave out of a build without an error.
NEEDED = {
    "armillary/py.typed",
    "armillary/report/page.js",
    "armillary/report/style.css",
    "armillary/project/template/.gitignore.tmpl",
    "armillary/project/template/package/main.py.tmpl",
}


def list_library() -> set[str]:
    """Returns the files of the package, as they lie in the checkout."""
    paths = (REPOSITORY / "armillary").rglob("*")
    return {
        path.relative_to(REPOSITORY).as_posix()
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts
    }


def find_one(folder: Path, pattern: str) -> Path:
    """Returns the one file of a kind that was built."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"{folder} has {len(found)} files {pattern}, and should have one.")
    return found[0]


def compare(name: str, found: set[str], expected: set[str]) -> None:
    """Ends the program if files are missing, or are there and should not be."""
    if missing := sorted((expected | NEEDED) - found):
        sys.exit(f"{name} lacks {', '.join(missing)}.")
    if others := sorted(found - expected):
        sys.exit(f"{name} has {', '.join(others)}, which should not be there.")


def check_contents(wheel: Path, sdist: Path) -> None:
    """Checks the lists of files of both."""
    library = list_library()
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"{wheel.name.rsplit('-', 3)[0]}.dist-info"
    files = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    compare(wheel.name, names, library | {f"{info}/{name}" for name in files})
    with tarfile.open(sdist) as archive:
        members = [member.name for member in archive if member.isfile()]
    names = {name.partition("/")[2] for name in members}
    others = {name for name in names if name.startswith(("docs/", "examples/"))}
    kept = {".gitignore", "CITATION.cff", "LICENSE", "PKG-INFO", *others}
    kept.add("pyproject.toml")
    kept |= {path.name for path in REPOSITORY.glob("*.md")}
    kept |= {path.name for path in REPOSITORY.glob("constraints*.txt")}
    compare(sdist.name, names, library | kept)
    print(f"{wheel.name} and {sdist.name} hold {len(library)} files of the library.")


class Environment:
    """An environment with nothing but the wheel and what it asks for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "env" / "bin"
        venv.create(folder / "env", with_pip=True)

    def run(self, command: str) -> str:
        """Runs lines of a shell outside of any checkout; returns what they print."""
        own = ("PYTHONPATH", "VIRTUAL_ENV", "XLA_FLAGS")
        variables = {name: os.environ[name] for name in os.environ if name not in own}
        ended = subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=self.folder,
            env={
                **variables,
                "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
                "PIP_CONSTRAINT": str(REPOSITORY / "constraints.txt"),
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
                "PIP_NO_COMPILE": "1",
                "JAX_PLATFORMS": "cpu",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ended.returncode != 0:
            sys.exit(f"{ended.stdout}\n{command}\nfailed with {ended.returncode}.")
        return ended.stdout


def check_use(wheel: Path, folder: Path) -> None:
    """Installs the wheel into an empty environment, and uses it there."""
    environment = Environment(folder)
    environment.run(f"pip install -q '{wheel}' scikit-learn && pip check")
    version = wheel.name.split("-")[1]
    for command in ("armillary --version", "python -m armillary --version"):
        answer = environment.run(command).strip()
        if answer != f"armillary {version}":
            sys.exit(f"{command} prints {answer!r}, and the wheel is {version}.")
    printed = environment.run("armillary new my_project")
    # Its own tests take longer, and tests/project runs them.
    lines = re.findall(r"^  (.+)$", printed, re.MULTILINE)
    commands = [line for line in lines if line != "python -m pytest"]
    if not any(command.startswith("pip install") for command in commands[:2]):
        sys.exit(f"`armillary new` begins without the install it needs:\n{printed}")
    shutil.copy(REPOSITORY / "examples" / "digits.py", folder)
    demo = (
        "python digits.py --devices 4 --steps 200 --run-dir demo --cache-dir compiled"
    )
    with ThreadPoolExecutor(2) as pool:
        project = pool.submit(environment.run, "\n".join(commands))
        for output in (pool.submit(environment.run, demo).result(), project.result()):
            if not re.search(r"Test accuracy 9\d\.\d\d%|'accuracy': 0\.9\d+", output):
                sys.exit(f"{output}\nIt has not learnt the digits.")
    print("The demo, and the project of `armillary new`, ran from the wheel.")


def main(folder: str) -> None:
    """Checks one wheel and one sdist."""
    wheel, sdist = (find_one(Path(folder), kind) for kind in ("*.whl", "*.tar.gz"))
    check_contents(wheel, sdist)
    with tempfile.TemporaryDirectory() as temporary:
        check_use(wheel.resolve(), Path(temporary))


if __name__ == "__main__":
    main(sys.argv[1])
