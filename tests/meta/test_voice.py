"""The voice check counts the right words, and leaves code and questions alone."""

import pytest

from tests.meta import voice


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("Of two values, the last counts.", ["Of ..."]),
        ("It runs. What it sees is kept.", ["What ..."]),
        ("| a | What it sees |", ["What ..."]),
        ("- Whoever waits is named.", ["Whoever ..."]),
        ("That of the chief counts.", ["That of ..."]),
        ("The mean is that\n  of the batch.", ["that of"]),
        ("Those of Keras go on, and the run goes on.", ["Those ...", "goes on"]),
        ("It is made anew, beside it, but for one.", ["anew", "beside", "but for"]),
    ],
)
def test_a_phrase_is_found(text, rules):
    assert [name for _, name in voice.find_phrases(text)] == rules


@pytest.mark.parametrize(
    "text",
    [
        "What does it print? A table.",
        "`Of this` is code, and so is the target of [a link](beside.md).",
        "Besides, the result of a step is that often.",
        "```text\nWhat it prints, anew.\n```",
    ],
)
def test_code_questions_and_other_words_are_left_alone(text):
    assert voice.find_phrases(text) == []


def test_a_hit_has_its_line():
    text = "# Title\n\n```python\nx = 1\n```\n\nIt is made\nanew."
    assert voice.find_phrases(text) == [(8, "anew")]


def test_messages_and_docstrings_are_texts_of_a_module():
    source = """\
def check(x):
    \"\"\"What is checked.\"\"\"
    raise ValueError(f"Of {x}, none fits.")
"""
    texts = list(voice.find_texts(source, has_messages=True))
    assert texts == [(2, "What is checked."), (3, "Of `code`, none fits.")]
    assert list(voice.find_texts(source, has_messages=False)) == texts[:1]


def test_a_summary_that_is_a_clause_is_found():
    source = '''\
"""Which worker failed."""

limit = 3
"""How long it waits."""


def finds():
    """Returns which worker failed. How long it took is unknown."""


def holds():
    """Hashes: has it one?"""
'''
    rules = [(1, "summary: Which ..."), (4, "summary: How ...")]
    assert sorted(voice.find_summaries(source)) == rules


def test_the_name_of_a_test_is_text():
    source = "def test_the_run_goes_on():\n    def goes_on(): ..."
    assert voice.find_test_names(source) == [(1, "test: goes on")]


def test_the_templates_of_a_project_are_read(tmp_path):
    names = {path.name for path in voice.list_files()}
    assert {"README.md.tmpl", "main.py.tmpl"} <= names
    module = tmp_path / "main.py.tmpl"
    module.write_text('"""Begins anew."""\nanew = 1\n')
    assert voice.find_in_file(module) == [(1, "anew")]


def test_comments_are_read_with_their_lines():
    source = "x = 1  # Of one value.\n# A value\n# that goes\n# on.\ny = '# Of'\n"
    comments = [(1, "Of one value."), (2, "A value\nthat goes\non.")]
    assert voice.find_comments(source) == comments
    assert voice.find_in_comments(comments) == [(1, "Of ..."), (3, "goes on")]


def test_comments_of_scripts_are_read():
    names = {path.name for path in voice.list_files()}
    assert {"Makefile", "ci.yml", "pyproject.toml", "run"} <= names
    makefile = "all: one\n\techo 'two  # Of'\n\t# Those that are installed.\n"
    comments = voice.find_lines_of_comments(makefile)
    assert comments == [(3, "Those that are installed.")]
    assert voice.find_in_comments(comments) == [(3, "Those ...")]


@pytest.mark.slow
def test_the_counts_name_files_and_add_up():
    *files, last = voice.show_counts().splitlines()
    total = sum(int(line.split()[0]) for line in files)
    assert last.startswith(f"warning: {total} phrases")
    assert f"in {len(files)} files" in last
