"""Pages that list what the code has: commands, options, variables and examples."""

import argparse
import ast
import inspect
import re
import tomllib

import optax
import pytest
from flax import nnx

from armillary import _cli, actions, metrics
from armillary.launch._command import add_launch
from tests.meta.test_docs import REPOSITORY, find_blocks

CLI = REPOSITORY / "docs" / "reference" / "cli.md"
LAUNCH = REPOSITORY / "docs" / "machines" / "launch.md"
VARIABLES = REPOSITORY / "docs" / "reference" / "environment_variables.md"
EXAMPLES = REPOSITORY / "examples"
OPTION = re.compile(r"(?<![\w-])(-m|--[a-z][a-z-]+)\b")
CAPITALS = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
# Words in capitals that mean something else: options of XLA and errors of JAX, names of
# opcodes, of policies and of types, limits of the system, and what a help text says.
NOT_VARIABLES = {
    "DT_STRING",
    "F8_E4M3",
    "F8_E4M3FNUZ",
    "F8_E5M2",
    "F8_E5M2FNUZ",
    "F8_E8M0",
    "IMPORT_FROM",
    "LIBRARY_FUSION_TYPE_REDUCE",
    "LOAD_ATTR",
    "LOAD_GLOBAL",
    "LOAD_METHOD",
    "LOAD_NAME",
    "ONLY_FIRST_REPLICA",
    "ON_READ",
    "ON_WRITE",
    "RESOURCE_EXHAUSTED",
    "RUN_DIR",
    "SC_CLK_TCK",
    "STORE_GLOBAL",
    "TCP_USER_TIMEOUT",
}


def read_help(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        _cli.main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def read_sections():
    """Returns what the page says below each heading."""
    parts = re.split(r"^## armillary (\w+)$", CLI.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_page_has_each_command(capsys):
    listed = re.findall(r"^    ([a-z]+)\b", read_help(capsys), re.M)
    assert listed == list(read_sections()) == list(_cli._COMMANDS)


@pytest.mark.parametrize("name", _cli._COMMANDS)
def test_the_page_has_each_option_of_a_command(name, capsys):
    options = set(OPTION.findall(read_help(capsys, name)))
    # The launcher has a page of its own.
    page = LAUNCH.read_text() if name == "launch" else read_sections()[name]
    rows = re.findall(r"^\| `(-[^`]+)` \|", page, re.M)
    listed = {row.split()[0] for row in rows}
    assert listed == options - {"--help"}


@pytest.mark.parametrize("name", _cli._COMMANDS)
def test_the_page_has_an_example_of_a_command_with_options_that_exist(name, capsys):
    examples = [
        body
        for info, _, body in find_blocks(CLI)
        if info == "sh" and body.startswith(f"armillary {name} ")
    ]
    assert len(examples) == 1
    known = read_help(capsys, name)
    used = examples[0].partition("train.py --")[0] if name == "launch" else examples[0]
    assert all(option in known for option in OPTION.findall(used))


def test_the_page_of_the_launcher_has_the_defaults_of_its_options():
    parser = argparse.ArgumentParser()
    add_launch(parser)
    rows = re.findall(r"^\| `(--[\w-]+) .+?` \| (\d+) \|", LAUNCH.read_text(), re.M)
    assert len(rows) >= 5
    for option, shown in rows:
        default = parser.get_default(option.removeprefix("--").replace("-", "_"))
        # The number of workers is a range: the fewest and the most.
        assert default in (int(shown), (int(shown),) * 2), option


def read_capitals():
    """Returns the strings in capitals in the library's code, and all of its text."""
    found, text = set(), ""
    for path in (REPOSITORY / "armillary").rglob("*.py"):
        if "template" in path.parts:
            continue
        code = path.read_text()
        text += code
        for node in ast.walk(ast.parse(code)):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and CAPITALS.fullmatch(node.value):
                found.add(node.value)
    return found, text


def list_variables():
    """Returns the page of variables, and the table of the environment of a worker."""
    of_a_worker = LAUNCH.read_text().partition("\n## Environment of a worker\n")[2]
    return VARIABLES.read_text() + of_a_worker.partition("\n## ")[0]


def test_the_pages_of_environment_variables_have_each_variable_of_the_code():
    listed = {
        name
        for row in re.findall(r"^\| (`.*?) \|", list_variables(), re.M)
        for name in re.findall(r"`(\w+)`", row)
    }
    found, text = read_capitals()
    assert found >= NOT_VARIABLES
    assert found - NOT_VARIABLES - listed == set()
    assert [name for name in listed if not re.search(rf"\b{name}\b", text)] == []


def list_first_names(page, heading):
    """Returns the names in the first column of the tables under a heading."""
    text = (REPOSITORY / "docs" / page).read_text()
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    columns = re.findall(r"^\| (.*?) \|", section, re.M)
    return {name for column in columns for name in re.findall(r"`(\w+)`", column)}


def test_the_page_of_installing_has_each_extra():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys()
    assert list_first_names("start/install.md", "Extras") == extras


def test_the_page_of_actions_has_each_action():
    # `ExportFileManager` is an argument of the exports.
    expected = {*actions.__all__} - {"ExportFileManager"}
    listed = list_first_names("train/actions.md", "Available actions and conditions")
    assert listed == expected


def test_the_page_of_metrics_has_each_metric():
    assert list_first_names("train/metrics.md", "Available metrics") == {
        *metrics.__all__
    }


def test_the_defaults_of_pytorch_differ_where_the_page_says():
    page = REPOSITORY / "docs" / "migrate" / "keras_and_lightning_names.md"
    text = (
        page.read_text().partition("optimizers of PyTorch\n")[2].partition("\n## ")[0]
    )
    given = {
        (nnx.Conv.__init__, "padding"): "VALID",
        (nnx.BatchNorm.__init__, "momentum"): 0.9,
        (nnx.LayerNorm.__init__, "epsilon"): 1e-5,
        (optax.adamw, "weight_decay"): 0.01,
    }
    for (function, argument), value in given.items():
        default = inspect.signature(function).parameters[argument].default
        assert default != value, "The page need not name this argument any more."
    named = re.findall(r"\| `(\w+)=([^`]+)`[^|]*\|$", text, re.M)
    assert {name: ast.literal_eval(value) for name, value in named} == {
        argument: value for (_, argument), value in given.items()
    }


def read_examples():
    """Returns the command of each program in the tables of the page of examples."""
    rows = re.findall(
        r"^\| \[[^\]]+\]\(([\w/]+\.py)\) \|.*?\| `([^`]+)` \|",
        (EXAMPLES / "README.md").read_text(),
        re.M,
    )
    return dict(rows)


def test_the_page_of_examples_has_each_program():
    programs = {
        path.relative_to(EXAMPLES).as_posix()
        for path in EXAMPLES.rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    assert programs == read_examples().keys()


def test_the_page_of_examples_has_each_module_that_programs_import():
    modules = {
        path.name
        for path in EXAMPLES.glob("*.py")
        if '__name__ == "__main__"' not in path.read_text()
    }
    page = (EXAMPLES / "README.md").read_text()
    section = page.partition("\n## Modules that programs import\n")[2]
    rows = re.findall(
        r"^\| \[(\w+\.py)\]\(\w+\.py\) \|.* \| (.*) \|$",
        section.partition("\n## ")[0],
        re.M,
    )
    assert {name for name, _ in rows} == modules
    for name, users in rows:
        line = re.compile(rf"^from {name.removesuffix('.py')} import", re.M)
        expected = {
            path.name for path in EXAMPLES.glob("*.py") if line.search(path.read_text())
        }
        assert set(re.findall(r"\[(\w+\.py)\]", users)) == expected, name


def test_each_program_has_a_time_and_a_result():
    rows = re.findall(
        r"^\| \[[^\]]+\]\([\w/]+\.py\) \|.*\| `[^`]+` \| (.*) \| (.*) \|$",
        (EXAMPLES / "README.md").read_text(),
        re.M,
    )
    assert len(rows) == len(read_examples())
    for time, result in rows:
        assert re.fullmatch(r"\d+ s|-", time), time
        assert re.search(r"\d", result), result


def test_the_results_of_the_notebooks_are_what_they_print():
    page = (EXAMPLES / "README.md").read_text()
    rows = re.findall(r"\((notebooks/\w+\.ipynb)\) \|.*? \| (.*) \|$", page, re.M)
    assert len(rows) == len(list(EXAMPLES.glob("notebooks/*.ipynb")))
    for name, result in rows:
        assert result.split()[-1] in (EXAMPLES / name).read_text(), name


def test_a_command_of_an_example_has_options_that_exist(capsys):
    launch_help = read_help(capsys, "launch")
    for name, command in read_examples().items():
        launched, _, arguments = command.partition(name)
        assert launched, command
        program = (EXAMPLES / name).read_text()
        assert all(option in launch_help for option in OPTION.findall(launched))
        assert all(f'"{option}"' in program for option in OPTION.findall(arguments))
