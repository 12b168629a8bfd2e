"""The files around the code: workflows, forms, hooks, addresses, citation and logo."""

import os
import re
import subprocess
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml  # Orbax needs it, so it is always installed.

from tests.meta.test_project import PYTHONS, find_lines
from tests.patience import patience

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
GITHUB = REPOSITORY / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").iterdir())
YAML_FILES = [
    *sorted(GITHUB.rglob("*.yml")),
    REPOSITORY / ".pre-commit-config.yaml",
    REPOSITORY / ".readthedocs.yaml",
    REPOSITORY / "CITATION.cff",
]
# An action whose tag someone moves would run other code, so a hash names it.
PINNED_ACTION = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40}")


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def list_jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in WORKFLOWS:
        for name, job in read(path)["jobs"].items():
            yield f"{path.name}: {name}", job


def list_steps() -> Iterator[dict[str, Any]]:
    for _, job in list_jobs():
        yield from job.get("steps", [])


@pytest.mark.parametrize("path", YAML_FILES, ids=name_of)
def test_each_file_is_a_mapping_in_yaml(path):
    assert isinstance(read(path), dict)


def test_continuous_integration_runs_on_each_python_of_the_project():
    prefix = "Programming Language :: Python :: 3."
    classifiers = [each for each in PROJECT["classifiers"] if each.startswith(prefix)]
    claimed = [each.rpartition(" ")[2] for each in classifiers]
    check = read(GITHUB / "workflows" / "ci.yml")["jobs"]["check"]
    assert check["strategy"]["matrix"]["python"] == claimed == list(PYTHONS)
    assert ".ci/run" in [step.get("run") for step in check["steps"]]


def test_a_change_gets_a_quick_answer_first():
    jobs = read(GITHUB / "workflows" / "ci.yml")["jobs"]
    quick = [step.get("run") for step in jobs["quick"]["steps"]]
    assert quick[-2:] == ["make check", "make test"]
    ends = [PYTHONS[0], PYTHONS[-1]]
    assert jobs["quick"]["strategy"]["matrix"]["python"] == ends
    pages = [step.get("run") for step in jobs["pages"]["steps"]]
    assert pages[-2:] == ["make docs", PROGRAMS_OF_PAGES]
    assert jobs["check"]["needs"] == "quick"
    assert jobs["check"]["if"] == "github.event_name != 'pull_request'"


def test_each_command_of_a_workflow_exists():
    targets = set(
        re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.M)
    )
    commands = [step["run"] for step in list_steps() if "run" in step]
    commands += read(REPOSITORY / ".readthedocs.yaml")["build"]["commands"]
    named = {name for each in commands for name in re.findall(r"\bmake ([\w-]+)", each)}
    long = {"differential", "libraries", "nightly", "plans", "soak", "versions"}
    assert long | {"dist", "docs", "test-all"} <= named <= targets
    assert (REPOSITORY / ".ci" / "run").is_file()


PROGRAMS_OF_PAGES = ".venv/bin/pytest tests/meta/test_docs.py tests/meta/test_readme.py"
NO_PACKAGES = "ERROR: No matching distribution found for jax==0.8.2"


@pytest.mark.parametrize(
    ("target", "status", "output", "is_good"),
    [
        ("none", 0, "", True),
        ("oldest", 2, NO_PACKAGES, True),
        ("plan-wheels", 2, "error: subprocess-exited-with-error", True),
        ("other", 124, "Installing ...", True),
        ("oldest", 2, "awk: cannot open constraints.txt", False),
        ("compare-sets", 2, NO_PACKAGES, False),
        ("test", 2, "1 failed", False),
    ],
)
def test_ci_leaves_out_only_packages_that_cannot_be_installed(
    target, status, output, is_good, tmp_path
):
    ended = run_ci(tmp_path, target, status, output)
    assert (ended.returncode == 0) == is_good, ended.stdout + ended.stderr
    assert output in ended.stdout
    is_left_out = f"Left out: make {target} " in ended.stdout
    assert is_left_out == (is_good and status != 0)
    if is_good:
        assert ended.stdout.endswith(f"Left out: {target if status else 'nothing'}.\n")


@pytest.mark.parametrize(("status", "output"), [(2, NO_PACKAGES), (124, "Installing")])
def test_ci_leaves_nothing_out_if_it_has_to_be_complete(status, output, tmp_path):
    ended = run_ci(tmp_path, "oldest", status, output, ARMILLARY_CI_COMPLETE="1")
    assert ended.returncode != 0
    assert "make oldest failed, and with ARMILLARY_CI_COMPLETE=1" in ended.stdout
    assert "All passed" not in ended.stdout
    complete = run_ci(tmp_path, "none", 0, "", ARMILLARY_CI_COMPLETE="1")
    assert complete.returncode == 0, complete.stdout + complete.stderr


def run_ci(folder, target, status, output, **variables):
    """Runs `.ci/run` with a `make` that fails for one target."""
    make = folder / "make"
    make.write_text(
        f'#!/bin/sh\n[ "$1" != {target} ] || {{ echo "{output}"; exit {status}; }}\n'
    )
    make.chmod(0o755)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ARMILLARY_CI_")
    }
    return subprocess.run(
        [str(REPOSITORY / ".ci" / "run")],
        env={**inherited, "PATH": f"{folder}:{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )


def test_each_job_has_a_limit_and_few_rights():
    for name, job in list_jobs():
        assert "timeout-minutes" in job or "uses" in job, name
    for path in WORKFLOWS:
        assert read(path)["permissions"] == {"contents": "read"}, path.name


def test_each_action_is_named_by_a_hash():
    used = [step["uses"] for step in list_steps() if "uses" in step]
    assert used
    assert [name for name in used if not PINNED_ACTION.fullmatch(name)] == []


def test_a_release_states_where_its_files_come_from():
    release = read(GITHUB / "workflows" / "release.yml")["jobs"]["release"]
    names = [
        step.get("uses", "").partition("@")[0] or step.get("run", "").split()[:2]
        for step in release["steps"]
    ]
    assert names.index("actions/attest") == names.index(["make", "dist"]) + 1
    assert release["permissions"].keys() == {"contents", "id-token", "attestations"}


def test_each_field_of_a_form_has_a_label():
    for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")):
        form = read(path)
        for field in form.get("body", []):
            assert field["attributes"]["label"], path.name
    assert {path.name for path in (GITHUB / "ISSUE_TEMPLATE").iterdir()} == {
        "bug.yml",
        "config.yml",
        "documentation.yml",
        "feature.yml",
    }


def test_hooks_run_what_make_check_runs():
    [local] = read(REPOSITORY / ".pre-commit-config.yaml")["repos"]
    makefile = (REPOSITORY / "Makefile").read_text()
    for hook in local["hooks"]:
        program = hook["entry"].split()[0]
        assert program.startswith(".venv/bin/")
        assert program.replace(".venv/bin", "$(BIN)") in makefile, hook["id"]


@pytest.mark.parametrize("name", ["README.md", "docs/index.md", "CITATION.cff"])
def test_the_first_sentence_is_the_same_everywhere(name):
    sentence = PROJECT["description"].lower()
    assert sentence in (REPOSITORY / name).read_text().lower()


def test_the_notes_of_a_release_are_its_part_of_the_changelog(tmp_path):
    steps = read(GITHUB / "workflows" / "release.yml")["jobs"]["release"]["steps"]
    [command] = [step["run"] for step in steps if "notes.md" in step.get("run", "")][:1]
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    for tag in ("v0.3.0", "v0.1.0"):
        environment = {**os.environ, "GITHUB_REF_NAME": tag}
        subprocess.run(
            ["sh", "-ec", command], cwd=tmp_path, env=environment, check=True
        )
        part = changelog.partition(f"\n## [{tag[1:]}]")[2].partition("\n## ")[0]
        notes = (tmp_path / "notes.md").read_text()
        assert notes.strip() == part.partition("\n")[2].strip()


def test_the_citation_has_the_newest_release_and_the_license():
    citation = read(REPOSITORY / "CITATION.cff")
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (\[\d.+)$", changelog, re.M)
    assert releases[0] == f"[{citation['version']}] - {citation['date-released']}"
    assert citation["license"] == PROJECT["license"]
    assert [each["name"] for each in citation["authors"]] == [
        each["name"] for each in PROJECT["authors"]
    ]


def belongs_to_someone(address: str) -> bool:
    """Returns whether an address can have an owner; reserved names cannot."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    is_reserved = host.rpartition(".")[2] in {"example", "invalid", "localhost", "test"}
    return parts.scheme == "https" and "." in host and not is_reserved


@pytest.mark.parametrize(
    ("address", "belongs"),
    [
        ("https://github.com/owner/name", True),
        ("https://armillary.example", False),
        ("https://docs.armillary.example/tutorial", False),
        ("http://github.com/owner/name", False),
        ("https://localhost/armillary", False),
    ],
)
def test_a_reserved_name_is_no_address_of_a_project(address, belongs):
    assert belongs_to_someone(address) == belongs


def test_the_addresses_of_the_project_are_real_and_stand_in_one_file():
    for name, address in PROJECT.get("urls", {}).items():
        assert belongs_to_someone(address), name
        lines = find_lines(re.compile(re.escape(address)))
        assert {line.partition(":")[0] for line in lines} == {"pyproject.toml"}, name


def test_the_logo_is_a_picture_with_a_title():
    root = ElementTree.parse(REPOSITORY / "docs" / "images" / "logo.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.find("{http://www.w3.org/2000/svg}title") is not None


def test_the_roadmap_has_at_most_ten_items():
    numbers = re.findall(r"^(\d+)\. ", (REPOSITORY / "ROADMAP.md").read_text(), re.M)
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert 5 <= len(numbers) <= 10
