"""The programs of the processes in these tests, one function for each scenario."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils

import armillary
from armillary.actions import _export
from armillary.checkpoint import _reader, _writer
from armillary.data import from_arrays
from armillary.lifeline import _lifeline
from tests.multiprocess.scenarios import catch
from tests.multiprocess.sharded import sharded
from tests.patience import patience
from tests.problems import CNN, MLP, Classifier, make_digits, read_state


class Counter(armillary.StandardEvaluator):
    """Counts and sums the examples of an evaluation, on all replicas."""

    def __init__(self, strategy: Any, dataset: Any) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.total = nnx.metrics.Average("x")
        self.num_steps = jnp.zeros((), jnp.int32)

    def eval_begin(self) -> None:
        self.total.reset()
        self.num_steps = jnp.zeros((), jnp.int32)

    def eval_step(self, iterator: Any) -> None:
        self.strategy.run(lambda b: self.total.update(x=b["x"]), (next(iterator),))
        self.num_steps = self.num_steps + 1

    def eval_end(self, *state: Any) -> Any:
        del state
        count, total = self.total.count, self.total.total
        return {"count": count[...] + 0, "sum": total[...] + 0, "n": self.num_steps}


def train(strategy: Any, num_steps: int = 12) -> dict[str, Any]:
    """Trains the model with all kinds of state; evaluates uneven data exactly."""
    trainer = make_trainer(strategy)
    for _ in range(2):
        trainer.train(num_steps // 2)
    numbers = from_arrays({"x": np.arange(37, dtype=np.float32)}, batch_size=16)
    counter = Counter(strategy, strategy.distribute_dataset(numbers))
    counted = [read_numbers(counter.evaluate(-1)) for _ in range(2)]
    losses, state = np.asarray(trainer.losses), read_state(trainer)
    return {
        "losses": losses[:num_steps].tolist(),
        "state": {path: digest(value) for path, value in state.items()},
        "sums": {path: float(np.sum(value)) for path, value in state.items()},
        "counted": counted,
    }


def fit_keras(strategy: Any, seeds: tuple[int, ...] = (0, 0)) -> dict[str, Any]:
    """Fits, evaluates and asks a Keras model, with uneven batches."""
    import keras

    index = strategy.peers.index
    inputs = np.random.default_rng(0).normal(size=(37, 3)).astype("float32")
    targets = inputs[:, :1] * 2
    with jax.numpy_rank_promotion("allow"):
        keras.utils.set_random_seed(seeds[index])
        with strategy.scope():
            layers = [keras.layers.Dense(4, "relu"), keras.layers.BatchNormalization()]
            model = keras.Sequential([*layers, keras.layers.Dense(1)])
            model.compile("adam", "mse", metrics=["mae"])
        history = model.fit(inputs, targets, batch_size=8, epochs=2, verbose=0)
        evaluated = model.evaluate(inputs, targets, verbose=0, return_dict=True)
        predicted = model.predict(inputs, batch_size=16, verbose=0)
    return {
        "history": history.history,
        "evaluated": evaluated,
        "predicted": np.asarray(predicted).tolist(),
    }


def values(strategy: Any) -> dict[str, Any]:
    """Uses what a loop of the user's own does, outside any trainer."""
    data = from_arrays({"x": np.arange(16, dtype=np.float32)}, batch_size=8)
    weight = nnx.Variable(jnp.ones(()))

    @armillary.function(strategy=strategy)
    def step(batch: Any) -> Any:
        weight[...] += 1
        return strategy.run(lambda b: b["x"] * weight[...], args=(batch,))

    sums, gathered, local = [], [], []
    for batch in strategy.distribute_dataset(data):
        output = step(batch)
        sums.append(float(strategy.reduce("sum", output, axis=0)))
        gathered.append(np.asarray(strategy.gather(output, axis=0)).tolist())
        local.append([np.asarray(row).tolist() for row in local_rows(strategy, output)])
    options = armillary.data.InputOptions(place_on_device=True)
    resident = [
        float(strategy.reduce("sum", batch["x"], axis=0))
        for batch in strategy.distribute_dataset(data, options)
    ]
    eager = Adder(strategy, strategy.distribute_dataset(data), compile_step=False)
    eager.train(2)
    own = strategy.distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    doubled = strategy.run(lambda value: 2 * value, args=(own,))
    numbers = from_arrays({"x": np.arange(37, dtype=np.float32)}, batch_size=16)
    predicted = armillary.predict(
        lambda b: b["x"] * weight[...], numbers, strategy=strategy
    )
    return {
        "predicted": [output.tolist() for output in predicted],
        "sums": sums,
        "gathered": gathered,
        "local": local,
        "own": [float(row) for row in local_rows(strategy, doubled)],
        "resident": resident,
        "eager": float(eager.total),
        "weight": float(weight[...]),
        "resolver": type(strategy.cluster_resolver).__name__,
        "repr": repr(strategy),
        "replicas": strategy.num_replicas_in_sync,
    }


def resume(strategy: Any, run_dir: str, steps: int) -> Any:
    """Trains up to a step from the latest checkpoint of a folder, and saves."""
    trainer = Reader(strategy)
    directory = Path(run_dir)
    best = armillary.actions.NewBestMetric(
        "accuracy", higher_is_better=True, directory=directory / "best"
    )
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=strategy,
        steps_per_loop=3,
        summary_dir=directory / "summary",
        train_actions=[best],
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer, data=trainer.train_dataset),
            directory / "checkpoints",
            checkpoint_interval=6,
        ),
    )
    start = int(trainer.optimizer.step[...])
    controller.train(steps)
    return {
        "start": start,
        "losses": np.asarray(trainer.losses)[:steps].tolist(),
        "seen": np.asarray(trainer.seen)[:steps].tolist(),
        "best": best.best_value,
    }


def preempted(
    strategy: Any, run_dir: str, steps: int, signal_at: int = -1
) -> dict[str, Any]:
    """Trains from the latest checkpoint on; soon after a step, process 1 must go."""
    trainer = make_trainer(strategy)
    step = trainer.optimizer.step
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer, data=trainer.train_dataset),
        run_dir,
        checkpoint_interval=6,
    )

    def terminate_soon(output: Any) -> None:
        if int(step[...]) == signal_at and jax.process_index() == 1:
            Path(run_dir).with_name("signal").write_text(str(time.time()))
            # Again and again, until nothing of this process is left.
            again = f"while kill -TERM {os.getpid()}; do sleep 0.02; done"
            terminate = f"sleep 0.2; {again}"
            subprocess.Popen(["sh", "-c", terminate], stderr=subprocess.DEVNULL)

    with armillary.actions.SaveCheckpointIfPreempted(manager) as save_if_preempted:
        controller = armillary.Controller(
            trainer=trainer,
            global_step=step,
            strategy=strategy,
            steps_per_loop=3,
            train_actions=[terminate_soon, save_if_preempted],
            checkpoint_manager=manager,
        )
        start = int(step[...])
        if signal_at != -1:
            # Its first save is running when the signal comes.
            write = _writer.write_folder

            def write_slowly(*args: Any, **kwargs: Any) -> Callable[[], None]:
                wait = write(*args, **kwargs)
                return lambda: (time.sleep(0.5), wait())[1]

            _writer.write_folder = write_slowly
        controller.train(steps)
    state = {path: digest(value) for path, value in read_state(trainer).items()}
    return {"start": start, "state": state}


class Reader(Classifier):
    """Notes each example; its model is the same on any number of replicas."""

    def __init__(self, strategy: Any) -> None:
        arrays = {**make_digits(72), "id": np.arange(72, dtype=np.int32)}
        source = from_arrays(arrays, batch_size=16, shuffle_seed=3, repeat=True)
        dataset = strategy.distribute_dataset(source)
        super().__init__(strategy, CNN(nnx.Rngs(0)), optax.adam(1e-2), dataset)
        self.seen = jnp.full((64, 16), -1)

    def train_step(self, iterator: Any) -> None:
        batch, step = next(iterator), self.optimizer.step[...]
        super().train_step(iter([batch]))
        ids = self.strategy.run(lambda b: b["id"], (batch,))
        self.seen = self.seen.at[step].set(self.strategy.gather(ids, axis=0))


def uneven(strategy: Any, lengths: list[int]) -> dict[str, Any]:
    """Gives each process data of its own, of different length."""

    def make(batch_size: int, input_context: Any) -> Any:
        index = input_context.input_pipeline_id
        assert input_context.num_input_pipelines == len(lengths)
        numbers = 100 * index + np.arange(lengths[index], dtype=np.float32)
        size = input_context.get_per_replica_batch_size(batch_size)
        return from_arrays({"x": numbers}, batch_size=size)

    batch_size = 4 * strategy.num_replicas_in_sync
    counter = Counter(
        strategy,
        armillary.distribute.make_distributed_dataset(strategy, make, batch_size),
    )
    counted = [read_numbers(counter.evaluate(-1)) for _ in range(2)]
    drop = armillary.data.InputOptions(remainder="drop")
    dataset = armillary.distribute.make_distributed_dataset(
        strategy, make, batch_size, input_options=drop
    )
    trainer = Adder(strategy, dataset)
    trainer.train(1)
    state = dataset.get_state()
    for _ in range(3):
        trainer.train(50)
    position = [part["source"] for part in state["pipelines"]]
    again = armillary.distribute.make_distributed_dataset(
        strategy, make, batch_size, input_options=drop
    )
    again.set_state(state)
    resumed = Adder(strategy, again)
    resumed.train(50)
    batches = sum(1 for _ in again)
    return {
        "counted": counted,
        "steps": int(trainer.num_steps),
        "sum": float(trainer.total),
        "resumed": int(resumed.num_steps),
        "exhausted": trainer.data_exhausted,
        "pipelines": len(position),
        "batches": batches,
        "refused": catch(lambda: again.set_state({"pipelines": [{}, {}, {}]})),
    }


def double_and_add(x: Any) -> Any:
    """Returns a value that each replica has of its own, and one that all share."""
    return 2 * x, armillary.get_replica_context().all_reduce("sum", x.sum())


def odd(strategy: Any) -> dict[str, Any]:
    """Trains on batches of 10, 10 and 9 examples, which 4 replicas cannot share."""
    exact = armillary.data.InputOptions(remainder="exact")
    digits = from_arrays(make_digits(29), batch_size=10, shuffle_seed=3)
    trainer = Classifier(
        strategy,
        CNN(nnx.Rngs(0)),
        optax.sgd(0.1),
        strategy.distribute_dataset(digits, exact),
    )
    trainer.train(10)
    numbers = from_arrays({"x": np.arange(29, dtype=np.float32)}, batch_size=10)
    gathered, local, totals = [], [], []
    for batch in strategy.distribute_dataset(numbers, exact):
        doubled, total = strategy.run(double_and_add, args=(batch["x"],))
        gathered.append(np.asarray(strategy.gather(doubled, axis=0)).tolist())
        totals += [row.tolist() for row in local_rows(strategy, total)]
        local.append([row.tolist() for row in local_rows(strategy, doubled)])
    resident = armillary.data.InputOptions(remainder="exact", place_on_device=True)
    adder = Adder(strategy, strategy.distribute_dataset(numbers, resident))
    adder.train(10)
    own = strategy.distribute_datasets_from_function(lambda _: numbers, exact)
    return {
        "losses": np.asarray(trainer.losses[:3]).tolist(),
        "sums": [float(np.sum(value)) for value in read_state(trainer).values()],
        "gathered": gathered,
        "local": local,
        "totals": totals,
        "resident": [float(adder.total), int(adder.num_steps)],
        "refused": "" if strategy.peers.is_alone else catch(lambda: iter(own)),
    }


class Adder(armillary.StandardTrainer):
    """Adds up the examples of all replicas."""

    def __init__(self, strategy: Any, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, armillary.StandardTrainerOptions(**options))
        self.strategy = strategy
        self.num_steps = jnp.zeros((), jnp.int32)
        self.total = jnp.zeros(())
        self.scale = 1.0

    def train_step(self, iterator: Any) -> None:
        rows = self.strategy.run(lambda b: b["x"] * self.scale, (next(iterator),))
        self.total = self.total + self.strategy.reduce("sum", rows, axis=0)
        self.num_steps = self.num_steps + 1


def mismatches(strategy: Any) -> dict[str, Any]:
    """Does something else in the last process, and returns the message to it."""
    index = int(jax.process_index() == jax.process_count() - 1)
    numbers = np.arange(64, dtype=np.float32)

    def make_adder(data: Any) -> Adder:
        dataset = strategy.distribute_dataset(from_arrays({"x": data}, batch_size=8))
        return Adder(strategy, dataset)

    seed = make_trainer(strategy, seed=index)
    program = make_adder(numbers)
    program.scale = 1.0 + index
    batches = [{"x": rows} for rows in np.split(numbers, 8)[: 8 - index]]
    shorter = Adder(strategy, strategy.distribute_dataset(batches))
    # As after a shuffle without a seed.
    order = [{"x": rows} for rows in np.split(np.roll(numbers, index), 8)]
    shuffled = Adder(strategy, strategy.distribute_dataset(order))
    peeked = make_adder(numbers)
    if index:
        next(iter(peeked.train_dataset))
    own = jnp.full((2,), 1.0 + index)
    return {
        "seed": catch(lambda: seed.train(2)),
        "program": catch(lambda: program.train(2)),
        "run": catch(lambda: strategy.run(lambda: own * 3)),
        "argument": catch(lambda: strategy.run(jnp.square, args=(own,))),
        "gathered": catch(lambda: strategy.gather({"own": own}, axis=0)),
        "reduced": catch(lambda: strategy.reduce("mean", 1.0 + index)),
        "data": catch(lambda: shorter.train(20)),
        "shuffled": catch(lambda: shuffled.train(8)),
        "peeked": catch(lambda: peeked.train(2)),
        "again": catch(
            lambda: armillary.MultiWorkerMirroredStrategy(
                communication_options=armillary.cluster.CommunicationOptions(
                    timeout_seconds=5
                )
            )
        ),
        "equal": catch(lambda: make_adder(numbers).train(2)),
    }


def stop(strategy: Any) -> dict[str, Any]:
    """Asks for a stop in the last process, at step 6."""
    trainer = make_trainer(strategy)
    step = trainer.optimizer.step
    controller: Any = None

    def ask(output: Any) -> None:
        is_last = jax.process_index() == jax.process_count() - 1
        if int(step[...]) == 6 and is_last:
            controller.request_stop("enough")

    controller = armillary.Controller(
        trainer=trainer,
        global_step=step,
        strategy=strategy,
        steps_per_loop=3,
        train_actions=[ask],
    )
    controller.train(30)
    return {"step": int(step[...])}


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


def grouped(strategy: Any) -> dict[str, Any]:
    """Reduces over all devices, with one group for each process."""
    del strategy
    ops = armillary.distribute.HierarchicalCopyAllReduce()
    made = armillary.MultiWorkerMirroredStrategy(cross_device_ops=ops)

    def make(context: Any) -> Any:
        return np.arange(5, dtype=np.float32) + context.replica_id_in_sync_group

    def run(rows: Any) -> Any:
        return made.run(lambda row: armillary.all_reduce("sum", row), (rows,))

    rows = made.distribute_values_from_function(make)
    (total, *_) = local_rows(made, run(rows))
    program = str(jax.make_jaxpr(run)(rows))
    groups = re.findall(r"axis_index_groups=(\(\(.*?\)\))", program)
    return {"total": total.tolist(), "groups": groups}


def several(strategy: Any, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Runs scenarios of this file one after the other, each with its options."""
    found = {name: globals()[name](strategy, **parts[name]) for name in parts}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return found | {"may open all files": soft == hard}


def make_trainer(strategy: Any, seed: int = 0) -> Classifier:
    digits = from_arrays(make_digits(72), batch_size=16, shuffle_seed=3, repeat=True)
    dataset = strategy.distribute_dataset(digits)
    return Classifier(strategy, MLP(nnx.Rngs(seed)), optax.adam(1e-2), dataset)


def local_rows(strategy: Any, value: Any) -> list[np.ndarray]:
    return [np.asarray(row) for row in strategy.local_results(value)]


def read_numbers(output: Any) -> dict[str, float]:
    return {name: float(np.asarray(value)) for name, value in output.items()}


def digest(value: np.ndarray) -> str:
    return np.ascontiguousarray(value).tobytes().hex()[:4000]


def main() -> None:
    # Some scenarios catch the error of a process, which ends the others after a time.
    _lifeline._FAILURE_SECONDS = patience(5.0)
    scenario, result, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    strategy = None
    if scenario == "sharded":
        found = sharded(**options)
    else:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        strategy = armillary.MultiWorkerMirroredStrategy()
        sys.stderr.write("has joined\n")
        found = globals()[scenario](strategy, **options)
    result.write_text(json.dumps(found))
    if strategy is not None and scenario == "preempted":
        strategy.peers.gather("the end", "")
        if not jax.process_index():
            # Process 1 would notice that the coordinator is gone.
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
