"""The end of a program says that training is over, unless it began again."""

import json
import subprocess
import sys

import pytest
from etils import epath

from armillary import _process
from armillary._process import Process
from armillary.controller import _watching
from armillary.controller._watching import (
    announce_ends,
    begin_training,
    end_training,
    read_end,
)


@pytest.fixture(autouse=True)
def texts(monkeypatch):
    monkeypatch.setattr(_watching, "_ends", texts := {})
    return texts


def test_each_end_of_a_training_is_another_one(tmp_path):
    folder = str(tmp_path)
    ends = []
    for step in (5, 5):
        begin_training(folder)
        assert read_end(folder) is None
        end_training(folder, step)
        assert read_end(folder) is None
        announce_ends()
        ends.append(read_end(folder))
    first, second = ends
    assert json.loads(first)["step"] == json.loads(second)["step"] == 5
    assert first != second


def test_only_the_chief_says_it(tmp_path, monkeypatch):
    (tmp_path / "DONE").write_text("earlier")
    monkeypatch.setattr(_process, "_current", Process(1, 2))
    begin_training(str(tmp_path))
    end_training(str(tmp_path), 5)
    announce_ends()
    assert read_end(str(tmp_path)) == "earlier"


def test_without_a_directory_nothing_is_written(tmp_path):
    begin_training(None)
    end_training(None, 5)
    end_training(str(tmp_path / "gone"), 5)
    announce_ends()
    assert list(tmp_path.iterdir()) == []
    assert read_end(None) is None


def test_a_file_that_cannot_be_changed_ends_nothing(tmp_path, caplog, monkeypatch):
    def refuse(path):
        raise OSError("read-only")

    (tmp_path / "DONE").touch()
    with monkeypatch.context() as patches:
        patches.setattr(type(epath.Path(tmp_path)), "unlink", refuse)
        begin_training(str(tmp_path))
    (tmp_path / "DONE").unlink()
    (tmp_path / "DONE").mkdir()  # This one is somebody else's, and stays.
    begin_training(str(tmp_path))
    end_training(str(tmp_path), 5)
    announce_ends()
    removal, writing = (record.getMessage() for record in caplog.records)
    assert "DONE` cannot be removed (read-only): an evaluator may end too" in removal
    assert "DONE` cannot be written (" in writing
    assert "): an evaluator may wait on." in writing
    assert (tmp_path / "DONE").is_dir()
    assert read_end(str(tmp_path)) is None


@pytest.mark.slow
def test_the_interpreter_says_it_at_its_end(tmp_path):
    code = (
        "import sys; "
        "from armillary.controller._watching import end_training, read_end; "
        "end_training(sys.argv[1], 7); assert read_end(sys.argv[1]) is None"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert json.loads((tmp_path / "DONE").read_text())["step"] == 7
