"""Tests that a project of `armillary new` is clean, trains, and passes its tests."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from armillary.project._command import check_new_folder, write_project
from tests.command import run_command
from tests.environment import REPOSITORY, forget_devices
from tests.patience import patience
from tests.tiers import slow_after_first

NAME = "digit_classifier"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    paths = f"{REPOSITORY}{os.pathsep}{folder}"
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={
            **forget_devices(),
            "PYTHONPATH": paths,
            "JAX_NUMPY_RANK_PROMOTION": "allow",
        },
        capture_output=True,
        text=True,
        timeout=patience(240),
    )


def run_well(folder: Path, *command: str) -> str:
    ended = run(folder, *command)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects") / NAME
    written = write_project(folder)
    assert written
    return folder


def test_the_command_writes_a_project_and_names_the_next_steps(tmp_path, capsys):
    folder = tmp_path / "new" / NAME
    assert run_command(["new", str(folder)]) == 0
    output = capsys.readouterr().out
    line = "pip install -e . pytest  # in the environment where Armillary is installed"
    assert f"  cd {folder}\n  {line}\n" in output
    assert f"python -m {NAME}.main" in output
    readme = (folder / "README.md").read_text()
    for page in (output, readme):
        assert "grep -rnI TODO . --exclude-dir=.venv" in page
    assert ".venv/" in (folder / ".gitignore").read_text().splitlines()
    paths = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")}
    names = ("config", "dataset", "losses", "main", "metrics", "model", "steps")
    assert {f"{NAME}/{name}.py" for name in names} < paths
    assert {"README.md", "pyproject.toml", ".gitignore", "tests/conftest.py"} < paths


def test_an_empty_directory_is_taken(tmp_path, monkeypatch):
    (tmp_path / NAME).mkdir()
    monkeypatch.chdir(tmp_path / NAME)
    assert run_command(["new", "."]) == 0
    assert (tmp_path / NAME / NAME / "main.py").is_file()


def test_the_name_takes_the_place_of_the_template_s(project):
    texts = [path.read_text() for path in project.rglob("*.*") if path.is_file()]
    assert not any("my_project" in text or ".tmpl" in text for text in texts)
    assert sum(NAME in text for text in texts) > 5


def test_it_asks_for_the_same_python_as_the_library(project):
    settings = [
        tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        for folder in (project, REPOSITORY)
    ]
    assert settings[0]["requires-python"] == settings[1]["requires-python"]


def test_every_part_names_the_lines_to_adapt(project):
    parts = [*(project / NAME).glob("*.py"), *(project / "tests").glob("test_*.py")]
    assert len(parts) == 12
    for path in [*parts, project / "pyproject.toml", project / "README.md"]:
        assert "TODO" in path.read_text(), path


@slow_after_first("name", [NAME, "a", "a_name_of_thirty_letters_in_all"[:30]])
@slow_after_first("has_own_settings", [False, True])
def test_the_code_passes_the_linter(tmp_path, name, has_own_settings):
    folder = tmp_path / name
    write_project(folder)
    own = folder if has_own_settings else REPOSITORY
    settings = ("--no-cache", "--config", str(own / "pyproject.toml"))
    # The library imports scikit-learn inside functions, and does not print. A program
    # may do both.
    run_well(folder, "ruff", "check", *settings, "--ignore", "TID253,T201", ".")
    run_well(folder, "ruff", "format", "--check", *settings, ".")


@pytest.mark.slow
def test_its_tests_pass(project):
    output = run_well(project, "pytest", "-q", "-p", "no:cacheprovider")
    assert re.search(r"\b[1-9]\d* passed", output), output


@pytest.mark.slow
def test_the_commands_of_its_readme_work(project, tmp_path):
    run_dir = ("--run-dir", str(tmp_path / "run"))
    arguments = (*run_dir, "steps=60", "steps_per_loop=20")
    output = run_well(project, f"{NAME}.main", "--devices", "2", *arguments)
    assert re.search(r"Test accuracy \d\d\.\d\d%", output), output
    folders = {path.name for path in (tmp_path / "run").iterdir()}
    assert folders == {"checkpoints", "compiled", "test", "train", "validation"}

    readme = (project / "README.md").read_text()
    command = f"armillary launch --workers 2 -m {NAME}.main --strategy multi_worker"
    assert command in readme
    arguments = (*run_dir, "steps=80", "steps_per_loop=20")
    output = run_well(project, *command.split(), *arguments)
    assert output.count("Test accuracy") == 2, output


@pytest.mark.slow
def test_a_misspelled_setting_is_an_error_that_lists_the_settings(project):
    ended = run(project, f"{NAME}.main", "learningrate=1")
    assert ended.returncode == 2
    assert "'learningrate=1' is not a setting. The settings are steps=" in ended.stderr


def test_the_code_is_plain(project):
    text = "".join(path.read_text() for path in (project / NAME).glob("*.py"))
    assert "load_digits" in text
    assert not any(word in text for word in ("nnx.jit", "locate_file", ".csv"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My-Project", "'My-Project', cannot be the name of a Python package"),
        ("2nd", "'2nd', cannot be the name of a Python package"),
        ("_hidden", "'_hidden', cannot be the name of a Python package"),
        ("class", "'class', is a keyword of Python"),
        ("json", "'json', is the name of another package, which the program needs"),
        ("tests", "'tests', is the name of another package"),
        ("jax", "'jax', is the name of a package that is installed already"),
        ("armillary", "'armillary', is the name of a package that is installed"),
        ("a" * 31, "is longer than 30 letters"),
    ],
)
def test_names_that_cannot_be(tmp_path, capsys, name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_new_folder(tmp_path / name)
    with pytest.raises(SystemExit) as ended:
        run_command(["new", str(tmp_path / name)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_existing_files_are_not_overwritten(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, what in (
        ("full", "is not empty"),
        ("file", "is not a directory"),
        ("link", "is not a directory"),
    ):
        with pytest.raises(ValueError, match=f"{name}', which {what}, and no file"):
            check_new_folder(tmp_path / name)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_the_template_is_part_of_the_package():
    folder = REPOSITORY / "armillary" / "project" / "template"
    paths = [str(path) for path in folder.rglob("*") if path.is_file()]
    assert len(paths) == 16
    # The build of the package leaves out files that git ignores.
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", *paths],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if ignored.returncode == 128:
        pytest.skip("This is no git checkout, so nothing is ignored.")
    assert ignored.stdout == ""
