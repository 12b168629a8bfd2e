"""`armillary checkpoint show`: what it prints, and what each mistake says."""

import json
import shutil

import jax
import jax.numpy as jnp
import pytest

from armillary import _cli
from armillary.actions import NewBestMetric
from armillary.checkpoint import Checkpoint, CheckpointManager

LONG = "a_name_that_does_not_fit_into_a_line_of_a_terminal_" * 3


class Position:
    def get_state(self):
        return {"kind": "arrays", "epoch": 2}

    def set_state(self, state):
        raise AssertionError


@pytest.fixture
def run_dir(tmp_path):
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    model = {
        "kernel": jax.device_put(jnp.zeros((8, 3), jnp.bfloat16), sharding),
        "key": jax.random.split(jax.random.key(0, impl="rbg"), 2),
        "empty": jnp.zeros((0, 3)),
    }
    optimizer = {
        "step": jnp.asarray(7, jnp.uint32),
        "loss": jnp.asarray(jnp.nan, jnp.float32),
        LONG: jnp.zeros(3, jnp.int8),
        "phase": jnp.asarray(1j, jnp.complex64),
    }
    best = NewBestMetric("accuracy", higher_is_better=True)
    checkpoint = Checkpoint(
        model=model, optimizer=optimizer, best=best, train_dataset=Position()
    )
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


def test_names_from_elsewhere_do_nothing_to_a_terminal(tmp_path, capsys):
    name = "\x1b[2J[/nope]"
    run_dir = tmp_path / name
    manager = CheckpointManager(Checkpoint(x={name: jnp.zeros(3)}), run_dir)
    path = manager.save(5)
    manager.close()
    (run_dir / "checkpoint_7" / "header").mkdir(parents=True)
    for directory in (path, run_dir):
        assert _cli.main(["checkpoint", "show", str(directory)]) == 0
        printed = capsys.readouterr().out
        assert "\x1b" not in printed
        assert r"\x1b[2J[/nope]" in printed


def test_a_checkpoint(run_dir, capsys):
    path = run_dir / "checkpoint_7"
    assert _cli.main(["checkpoint", "show", str(path)]) == 0

    printed = capsys.readouterr().out
    assert printed.startswith(f"{path}: step 7, 20")
    assert rows_of(printed) == [
        ["model/empty", "float32", "(0, 3)", "0", ""],
        ["model/kernel", "bfloat16", "(8, 3)", "48", ""],
        ["model/key", "key<rbg>", "(2,)", "32", ""],
        ["model: 3 arrays", "", "", "80", ""],
        [f"optimizer/{LONG}", "int8", "(3,)", "3", ""],
        ["optimizer/loss", "float32", "()", "4", "nan"],
        ["optimizer/phase", "complex64", "()", "8", "1j"],
        ["optimizer/step", "uint32", "()", "4", "7"],
        ["optimizer: 4 arrays", "", "", "19", ""],
    ]
    assert printed.endswith(
        'best: {"best_value": 0.75}\ntrain_dataset: {"kind": "arrays", "epoch": 2}\n'
    )


def test_a_directory(run_dir, capsys):
    (run_dir / "checkpoint_9").mkdir()
    (run_dir / "checkpoint_8.orbax-checkpoint-tmp-1").mkdir()
    shutil.copytree(run_dir / "checkpoint_7", run_dir / "checkpoint_6")
    (run_dir / "checkpoint_6" / "checksums.json").write_text("[")
    (run_dir / "checkpoint_6" / "header" / "header.json").write_text(
        (run_dir / "checkpoint_6" / "header" / "header.json")
        .read_text()
        .replace('"number": 7', '"number": 6')
    )
    assert _cli.main(["checkpoint", "show", str(run_dir)]) == 0

    printed = capsys.readouterr().out
    shown = [row[:2] for row in rows_of(printed)]
    assert shown == [["checkpoint_5", "5"], ["checkpoint_7", "7"]]
    assert all(row[2].endswith(" UTC") for row in rows_of(printed))
    assert f"{run_dir}/checkpoint_9: `header/header.json` is missing\n" in printed
    assert (
        "checkpoint_6', a checkpoint that cannot be read: `checksums.json` cannot be"
        in printed
    )
    assert "checkpoint_8.orbax-checkpoint-tmp-1 is not complete: a save was" in printed


def test_json(run_dir, capsys):
    assert _cli.main(["checkpoint", "show", "--json", str(run_dir)]) == 0
    listed = json.loads(capsys.readouterr().out)
    last = listed["checkpoints"][-1]
    files = [p for p in run_dir.glob("checkpoint_7/*/**/*") if p.is_file()]
    assert last["bytes_on_disk"] == sum(file.stat().st_size for file in files)
    assert (listed["broken"], listed["unfinished"]) == ({}, [])

    assert _cli.main(["checkpoint", "show", "--json", last["path"]]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {key: shown[key] for key in last} == last
    assert shown["leaves"]["model/kernel"] == {
        "dtype": "bfloat16",
        "shape": [8, 3],
        "bytes": 48,
    }
    assert shown["leaves"]["optimizer/step"]["value"] == 7
    assert shown["leaves"]["optimizer/loss"]["value"] == "NaN"
    assert shown["states"]["train_dataset"] == {"kind": "arrays", "epoch": 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: ACTION"),
        (["show"], "the following arguments are required: PATH"),
        (["show", "nowhere"], "nowhere', which is no folder, but it must be a check"),
        (["show", "file"], "file', which is no folder, but it must be a checkpoint"),
        (["show", "."], "or a directory of them. Use '/"),
        (["show", "empty"], "of them. Use the directory of a `CheckpointManager`"),
        (
            ["show", "run/checkpoint_5"],
            "read: `manifest/manifest.json` is missing. Show",
        ),
        (
            ["show", "run/checkpoint_7"],
            "read: `arrays/manifest.ocdbt` has 3 bytes instead of",
        ),
    ],
)
def test_mistakes_are_explained(words, message, run_dir, monkeypatch, capsys):
    (run_dir.parent / "empty").mkdir()
    (run_dir.parent / "file").touch()
    (run_dir / "checkpoint_5" / "manifest" / "manifest.json").unlink()
    (run_dir / "checkpoint_7" / "arrays" / "manifest.ocdbt").write_text("cut")
    monkeypatch.chdir(run_dir.parent)

    with pytest.raises(SystemExit) as raised:
        _cli.main(["checkpoint", *words])

    assert raised.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
