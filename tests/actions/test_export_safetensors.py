"""Tests that models are exported in safetensors during training."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import armillary
from armillary import pretrained
from armillary.actions import ExportFileManager, ExportSafetensors
from armillary.errors import CheckpointError, CheckpointMismatchError
from tests.patience import patience

NAMES = pretrained.Names([("linear.weight", "weights", pretrained.transpose)])
READ = """
import sys
from safetensors.numpy import load_file
(tensor,) = load_file(sys.argv[1]).values()
print(sorted({"armillary", "flax", "jax"} & sys.modules.keys()), tensor.tolist())
"""


def make_export(folder, model, **options):
    manager = ExportFileManager(folder / "export", max_to_keep=2)
    return ExportSafetensors(model, NAMES, manager, **options)


def test_a_run_exports_its_weights_for_a_program_without_armillary(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 3)).astype(np.float32)
    data = {"x": x, "y": x @ np.array([[1.0], [-2.0], [3.0]], np.float32)}

    def step(state, batch):
        error = batch["x"] @ state["weights"] - batch["y"]
        gradient = batch["x"].T @ error / len(error)
        return {"weights": state["weights"] - 0.1 * gradient}, {}

    trainer = armillary.StepTrainer(
        step,
        {"weights": jnp.zeros((3, 1))},
        armillary.data.from_arrays(data, batch_size=16, repeat=True),
    )
    (tmp_path / "config.json").write_text("{}")
    names = pretrained.Names(
        [
            ("linear.weight", "state/weights", pretrained.transpose),
            (None, "global_step"),
        ]
    )
    export = ExportSafetensors(
        trainer,
        names,
        ExportFileManager(tmp_path / "export", 2, next_id_fn=trainer.global_step),
        copy=[tmp_path / "config.json"],
    )
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.global_step,
        steps_per_loop=10,
        train_actions=[export],
    )
    controller.train(40)
    folders = [tmp_path / f"export-{step}" for step in (30, 40)]
    assert export.file_manager.managed_files == list(map(str, folders))
    for folder in folders:
        files = {path.name for path in folder.iterdir()}
        assert files == {"config.json", "model.safetensors"}

    path = folders[-1] / "model.safetensors"
    result = subprocess.run(
        [sys.executable, "-c", READ, str(path)],
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert result.returncode == 0, result.stderr
    expected = np.asarray(trainer.state["weights"]).T.tolist()
    assert result.stdout == f"[] {expected}\n"


def test_folders_of_killed_exports_are_removed_and_others_are_left(tmp_path):
    killed = tmp_path / "export-0"
    killed.mkdir()
    (killed / ".model.safetensors.incomplete").write_bytes(b"half")
    # This one was killed before its index had a name.
    almost = tmp_path / "export-5"
    almost.mkdir()
    (almost / "model-00001-of-00002.safetensors").write_bytes(b"whole")
    other = tmp_path / "export-1"
    other.mkdir()
    model = {"weights": jnp.ones((2, 3))}
    export = make_export(tmp_path, model, dtype="bfloat16", max_file_bytes=1)
    export.file_manager.next_name = iter(
        [str(tmp_path / f"export-{number}") for number in (2, 3, 4)]
    ).__next__
    for _ in range(3):
        export()
    assert {path.name for path in tmp_path.iterdir()} == {
        *("export-1", "export-3", "export-4"),
    }
    assert other.is_dir()
    saved = load_file(tmp_path / "export-4" / "model.safetensors")
    assert saved["linear.weight"].shape == (3, 2)
    assert saved["linear.weight"].dtype == jnp.bfloat16


def test_an_export_that_cannot_be_written_leaves_the_earlier_ones(tmp_path):
    model = {"weights": jnp.ones((2, 3))}
    export = make_export(tmp_path, model)
    export()
    model["other"] = jnp.ones(3)
    with pytest.raises(CheckpointMismatchError, match=r"\+ other: float32 \(3,\)"):
        export()
    assert export.file_manager.managed_files == [str(tmp_path / "export-0")]
    export = make_export(tmp_path, model, copy=[tmp_path / "config.json"])
    with pytest.raises(CheckpointError, match=r"cannot copy its files to .*config"):
        export()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"names": []}, TypeError, "`names` is .*the table of `armillary.pretrained"),
        ({"file_manager": 3}, TypeError, "`file_manager` is 3"),
        ({"copy": "config.json"}, TypeError, "`copy` is 'config.json'.*copy="),
        ({"copy": ["a/c.json", "b/c.json"]}, ValueError, "two files .* 'c.json'"),
        ({"dtype": "int8"}, ValueError, "`dtype` is 'int8'"),
        ({"max_file_bytes": 0}, ValueError, "`max_file_bytes` is 0"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, changes, error, message):
    manager = ExportFileManager(tmp_path / "export")
    options = {"model": {}, "names": NAMES, "file_manager": manager, **changes}
    with pytest.raises(error, match=message):
        ExportSafetensors(**options)
