"""Saves in several processes that fail in one of them, for `program.py`."""

import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import armillary
from armillary.checkpoint import _reader
from tests.multiprocess.digits import digest, make_trainer
from tests.multiprocess.scenarios import catch


def saves(strategy: Any, run_dir: str) -> dict[str, Any]:
    """Saves and restores where that fails in one process alone."""
    index, directory = jax.process_index(), Path(run_dir)
    holder = SimpleNamespace(array=jax.random.normal(jax.random.key(0), (1000, 1000)))

    def make(name: str, **options: Any) -> armillary.CheckpointManager:
        checkpoint = armillary.Checkpoint(holder=holder)
        return armillary.CheckpointManager(checkpoint, directory / name, **options)

    def damage(name: str, is_damaged: bool = True) -> None:
        if not index:
            manifest = directory / name / "manifest" / "manifest.json"
            kept = directory / name.replace("/", "_")
            manifest.rename(kept) if is_damaged else kept.rename(manifest)

    def save(manager: Any, number: int) -> Any:
        return [manager.save(number), manager.sync(), len(manager.checkpoints)][::2]

    damaged = []
    find_damage = _reader.find_damage

    def find_noted(path: Any, peers: Any) -> str | None:
        damaged.append(path.name)
        return find_damage(path, peers)

    _reader.find_damage = find_noted
    found: dict[str, Any] = {}
    good, bad = make("good"), make("bad")
    for manager, number in ((good, 1), (good, 2), (bad, 1)):
        save(manager, number)
    found |= restore_other_views(holder, directory / "good")
    damaged.clear()
    for name in ("good/checkpoint_2", "bad/checkpoint_1"):
        damage(name)
    found["good"] = good.restore_or_initialize()
    found["bad"] = catch(bad.restore_or_initialize)
    found["by name"] = catch(lambda: bad.restore(directory / "bad" / "checkpoint_1"))
    found["looked at"] = [*damaged]
    for sees in (0, 1):
        manager = make("good" if index == sees else "nowhere")
        found[f"only {sees} sees it"] = catch(manager.restore_or_initialize)
    mine = directory / ("good" if index else "bad") / "checkpoint_1"
    found["no folder"] = catch(lambda: good.restore(directory / f"none_{index}"))
    damage("bad/checkpoint_1", False)
    found["another folder"] = catch(lambda: good.restore(mine))

    best = make("best", max_to_keep=1, keep_best="a", higher_is_better=False)
    best.step_counter = lambda: number
    found["best"] = []
    for number, value in enumerate((3.0, 1.0, 2.0, 1.0, 0.5)):
        # The first process decides, and all of them take its word.
        if number != 3:
            save(best, number)
        found["best"].append(best.note_evaluation({"a": value + index}))
    found["best"] += [Path(best.restore_best()).name, len(best.checkpoints)]

    manager = make("run")
    block(directory / "run", True)
    found["start"] = catch(lambda: manager.save(3))
    block(directory / "run", False)
    found["after start"] = save(manager, 3)
    limit_files(index == 0)
    found["late"] = catch(lambda: save(manager, 4))
    limit_files(False)
    found["after late"] = save(manager, 5)
    found |= save_by_hand(holder, directory / "by_hand")
    return found | {"trained": train_over_failing_saves(strategy, directory)}


def save_by_hand(holder: Any, directory: Path) -> dict[str, Any]:
    """Saves without a manager, as the guides of TensorFlow do, and restores."""
    checkpoint = armillary.Checkpoint(holder=holder)
    saved = digest(np.asarray(holder.array))
    paths = [checkpoint.save(directory / "ckpt") for _ in range(2)]
    holder.array = jax.numpy.zeros_like(holder.array)
    latest = armillary.checkpoint.latest_checkpoint(directory)
    report = checkpoint.restore(latest).assert_consumed()
    is_back = digest(np.asarray(holder.array)) == saved
    return {
        "by hand": [*paths, report.path, is_back],
        "by hand, twice": catch(lambda: checkpoint.write(paths[0])),
    }


def restore_other_views(holder: Any, directory: Path) -> dict[str, Any]:
    """Restores where the last process sees something else than the others do."""
    index, found = jax.process_index(), {}

    def view(name: str, change: Any) -> armillary.CheckpointManager:
        mine = directory.with_name(f"{name}_{index}")
        shutil.copytree(directory, mine)
        if index:
            change(mine / "checkpoint_2")
        return armillary.CheckpointManager(armillary.Checkpoint(holder=holder), mine)

    def move(path: Path) -> None:
        manifest = path / "manifest" / "manifest.json"
        manifest.write_text(manifest.read_text().replace("1000", "1001"))

    def go_back(path: Path) -> None:
        shutil.rmtree(path)
        shutil.copytree(path.with_name("checkpoint_1"), path)

    moved, stale = view("moved", move), view("stale", go_back)
    newest = Path(moved.directory) / "checkpoint_2"
    found["moved, by name"] = catch(lambda: moved.restore(newest)).split("'")[2]
    found["moved"] = Path(moved.restore_or_initialize()).name
    found["stale"] = catch(stale.restore_or_initialize)
    return found


def train_over_failing_saves(strategy: Any, directory: Path) -> list[Any]:
    """Trains while process 0 cannot write for some steps."""
    index, trainer = jax.process_index(), make_trainer(strategy)
    ballast = jax.random.normal(jax.random.key(0), (1000, 1000))
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer, ballast=SimpleNamespace(array=ballast)),
        directory / "failing",
        checkpoint_interval=3,
    )

    def look(output: Any) -> None:
        manager.sync()
        limit_files(index == 0 and int(trainer.optimizer.step[...]) == 6)

    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=strategy,
        steps_per_loop=3,
        train_actions=[look],
        checkpoint_manager=manager,
    )
    error = catch(lambda: controller.train(12))
    limit_files(False)
    names = [Path(path).name for path in manager.checkpoints]
    return [error, int(trainer.optimizer.step[...]), names]


def block(directory: Path, is_blocked: bool) -> None:
    """Puts a file in the place of a directory, or removes it, before any continues."""
    if jax.process_index() == 0:
        directory.touch() if is_blocked else directory.unlink()
    multihost_utils.sync_global_devices(f"block {is_blocked}")


def limit_files(is_limited: bool) -> None:
    """Lets the kernel refuse to write larger files than 1 MB, or no longer."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    soft = 1_000_000 if is_limited else hard
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
