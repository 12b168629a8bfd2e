"""Tests of `armillary checkpoint show`: its output and its error messages."""

import jax
import jax.numpy as jnp
import pytest

from armillary.actions import NewBestMetric
from armillary.checkpoint import Checkpoint, CheckpointManager
from tests.command import run_command

LONG = "a_name_that_does_not_fit_into_a_line_of_a_terminal_" * 3


@pytest.fixture
def run_dir(tmp_path):
    model = {
        "kernel": jnp.zeros((8, 3), jnp.bfloat16),
        "key": jax.random.split(jax.random.key(0, impl="rbg"), 2),
        LONG: jnp.zeros(3, jnp.int8),
        "\x1b[2J[/nope]": jnp.asarray(7),
    }
    best = NewBestMetric("accuracy", higher_is_better=True)
    checkpoint = Checkpoint(model=model, best=best)
    manager = CheckpointManager(checkpoint, tmp_path / "run")
    manager.save(5)
    best.commit({"accuracy": 0.75})
    manager.save(7)
    manager.close()
    return tmp_path / "run"


def rows_of(printed):
    return [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in printed.splitlines()
        if line.startswith("│")
    ]


def test_a_checkpoint(run_dir, capsys):
    path = run_dir / "checkpoint_7"
    assert run_command(["checkpoint", "show", str(path)]) == 0

    printed = capsys.readouterr().out
    assert printed.startswith(f"{path}: step 7, 20")
    assert rows_of(printed) == [
        [r"model/\x1b[2J[/nope]", "int32", "()"],
        [f"model/{LONG}", "int8", "(3,)"],
        ["model/kernel", "bfloat16", "(8, 3)"],
        ["model/key", "key<rbg>", "(2,)"],
    ]
    assert printed.endswith('best: {"best_value": 0.75}\n')


def test_a_directory(run_dir, capsys):
    (run_dir / "checkpoint_9").mkdir()
    assert run_command(["checkpoint", "show", str(run_dir)]) == 0

    printed = capsys.readouterr().out
    first, second = rows_of(printed)
    assert first[:2] == ["checkpoint_5", "5"]
    assert second[2].endswith(" UTC")
    assert f"{run_dir}/checkpoint_9: `header/header.json` is missing\n" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "nowhere"], "nowhere', which has no checkpoint. It must be a ch"),
        (
            ["show", "run/checkpoint_5"],
            "a checkpoint that cannot be read: FileNotFound",
        ),
    ],
)
def test_mistakes_are_explained(words, message, run_dir, monkeypatch, capsys):
    (run_dir / "checkpoint_5" / "manifest" / "manifest.json").unlink()
    monkeypatch.chdir(run_dir.parent)

    with pytest.raises(SystemExit) as raised:
        run_command(["checkpoint", *words])

    assert raised.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
