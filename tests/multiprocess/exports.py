"""Exports while several processes train, for `program.py`."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import armillary
from armillary.actions import _export
from tests.multiprocess.digits import make_trainer
from tests.multiprocess.scenarios import catch
from tests.problems import Classifier, make_digits


def exports(strategy: Any, run_dir: str) -> dict[str, Any]:
    """Exports while it trains, and restores a part; then one process cannot write."""
    directory = Path(run_dir)
    written: list[str] = []
    write = _export.write_whole

    def write_noted(path: Any, data: Any, temporary: str) -> None:
        written.append(path.name)
        write(path, data, temporary)

    _export.write_whole = write_noted

    def make_export(trainer: Classifier, base_name: Path) -> Any:
        def predict(image: Any) -> Any:
            trainer.model.eval()
            return trainer.model(image)

        return armillary.actions.ExportModel(
            predict,
            armillary.actions.ExportFileManager(
                base_name, 2, next_id_fn=trainer.optimizer.step
            ),
            args=(jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32),),
            polymorphic_batch_size=True,
        )

    def call(path: Path) -> Any:
        images = make_digits(5)["image"]
        return np.asarray(
            jax.export.deserialize(path.read_bytes()).call(images)
        ).tolist()

    trainer = make_trainer(strategy)
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer), directory / "checkpoints"
    )
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=strategy,
        steps_per_loop=2,
        train_actions=[make_export(trainer, directory / "export")],
        checkpoint_manager=manager,
    )
    controller.train(6)
    other = make_trainer(strategy, seed=1)
    part = armillary.CheckpointManager(
        armillary.Checkpoint(trainer=other), directory / "other"
    )
    path = directory / "checkpoints" / "checkpoint_6"
    report = part.checkpoint.read(path, only="trainer/model")
    make_export(other, directory / "other")()
    part.save(0)
    part.sync()
    found = {
        "names": sorted(path.name for path in directory.glob("export-*")),
        "trained": call(directory / "export-6"),
        "restored": call(directory / "other-0"),
        "report": [report.restored, report.kept],
        "losses": np.asarray(trainer.losses)[:6].tolist(),
    }
    (directory / "file").write_text("")
    fail = make_export(trainer, directory / "file" / "export")

    def export_and_save() -> None:
        fail()
        manager.save()

    return found | {"written": written, "error": catch(export_and_save)}
