"""The program of two processes under `ShardedStrategy`, all scenarios in one start."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import armillary
from armillary.data import InputOptions, from_arrays
from armillary.distribute._global_arrays import as_local
from armillary.plan import plan
from tests.problems import Classifier, make_digits, read_leaves

SHAPE = {"fsdp": 2, "tensor": 2}
RULES = {
    "first/kernel": PartitionSpec("fsdp", "tensor"),
    "last/kernel": PartitionSpec("tensor"),
}
NUM_STEPS = 5


class Wide(nnx.Module):
    """A classifier with every kind of state, and one array that is worth a split."""

    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(seed + 1))
        self.last = nnx.Linear(32, 3, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(self.first(x.reshape(x.shape[0], -1)))
        return self.last(self.dropout(nnx.relu(x)))


class Trainer(Classifier):
    """Puts out a parameter as well, of which no process has all."""

    def __init__(self, strategy: Any, seed: int = 0, **options: Any) -> None:
        # Five batches, of 10, 10, 10, 10 and 9 examples.
        source = from_arrays(make_digits(49), batch_size=10, shuffle_seed=3)
        dataset = strategy.distribute_dataset(source, InputOptions(remainder="exact"))
        super().__init__(
            strategy, Wide(seed), optax.sgd(0.1, momentum=0.9), dataset, **options
        )

    def train_loop_end(self) -> armillary.typing.Output:
        return {
            "accuracy": self.accuracy.compute(),
            "kernel": self.model.first.kernel[...],
        }


class Curious(Trainer):
    """Looks at an array of which each process has a part."""

    def train_loop_end(self) -> armillary.typing.Output:
        return {"kernel": np.asarray(self.model.first.kernel[...])}


class Logits(armillary.StandardEvaluator):
    """Collects what a model says of 21 examples, on the host."""

    def __init__(self, strategy: Any, model: nnx.Module) -> None:
        super().__init__(
            strategy.distribute_dataset(from_arrays(make_digits(21), batch_size=16))
        )
        self.strategy = strategy
        self.model = nnx.view(model, deterministic=True, use_running_average=True)
        self.accuracy = nnx.metrics.Accuracy()

    def eval_begin(self) -> Any:
        self.accuracy.reset()
        return []

    def eval_step(self, iterator: Any) -> Any:
        def step_fn(batch: Any) -> Any:
            logits = self.model(batch["image"])
            self.accuracy.update(logits=logits, labels=batch["label"])
            return logits

        return self.strategy.run(step_fn, (next(iterator),))

    def eval_reduce(self, state: Any, step_outputs: Any) -> Any:
        return [*state, np.asarray(self.strategy.gather(step_outputs, axis=0))]

    def eval_end(self, *state: Any) -> armillary.typing.Output:
        count = self.accuracy.count[...] + 0
        return {"sum": np.sum(np.concatenate(state[0])), "count": count}


def make_manager(trainer: Trainer, path: Path) -> armillary.CheckpointManager:
    checkpoint = armillary.Checkpoint(trainer=trainer, data=trainer.train_dataset)
    return armillary.CheckpointManager(checkpoint, path)


def make_controller(trainer: Trainer, path: Path, **options: Any) -> Any:
    return armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=trainer.strategy,
        steps_per_loop=2,
        checkpoint_manager=make_manager(trainer, path),
        **options,
    )


def train(strategy: Any, directory: Path) -> dict[str, Any]:
    """Trains over uneven batches with a controller, and evaluates."""
    trainer, seen = Trainer(strategy), []
    controller = make_controller(
        trainer,
        directory / "whole",
        evaluator=Logits(strategy, trainer.model),
        summary_dir=directory / "summary",
        train_actions=[seen.append],
    )
    controller.train(10)
    evaluated = controller.evaluate(-1)
    state = read(trainer)
    return {
        "step": int(trainer.optimizer.step[...]),
        "losses": np.asarray(trainer.losses)[:NUM_STEPS].tolist(),
        "sums": {path: float(np.sum(value)) for path, value in state.items()},
        "state": digests(state),
        "accuracy": [float(output["accuracy"]) for output in seen],
        "kernels": [float(output["kernel"].sum()) for output in seen],
        "evaluated": {name: float(value) for name, value in evaluated.items()},
    }


def own_loop(strategy: Any) -> dict[str, Any]:
    """Uses what a loop of the user's own does, outside any trainer."""
    model = Wide()
    model.eval()
    data = from_arrays({"x": make_digits(24)["image"]}, batch_size=16)
    losses, gathered, shapes = [], [], []

    @armillary.function
    def step(batch: Any) -> Any:
        return strategy.run(lambda b: jnp.sum(model(b["x"]) ** 2, axis=1), (batch,))

    for batch in strategy.distribute_dataset(data):
        output = step(batch)
        shapes.append([shard.data.shape[0] for shard in output.addressable_shards])
        losses.append(float(strategy.reduce("mean", output, axis=0)))
        gathered += np.asarray(strategy.gather(output, axis=0)).tolist()
    resident = InputOptions(place_on_device=True)
    for batch in strategy.distribute_dataset(data, resident):
        gathered += np.asarray(strategy.gather(step(batch), axis=0)).tolist()
    return {"losses": losses, "gathered": gathered, "shapes": shapes}


def resume(strategy: Any, directory: Path) -> list[Any]:
    """Trains in two parts, each with a trainer of its own."""
    starts = []
    for seed, steps in (0, 3), (1, 10):
        # With outputs that Python makes.
        trainer = Trainer(strategy, seed, compile_hooks=False)
        controller = make_controller(trainer, directory / "parts")
        starts.append(int(trainer.optimizer.step[...]))
        controller.train(steps)
    return [starts, digests(read(trainer))]


def move(strategies: list[Any], path: Path) -> list[dict[str, str]]:
    """Restores a checkpoint, saves it under another strategy, restores that, and so on.

    Returns the state under each.
    """
    found = []
    for seed, strategy in enumerate(strategies):
        trainer = Trainer(strategy, seed)
        if seed % 2:
            trainer.train(1)  # The replaced arrays are on their devices.
        assert make_manager(trainer, path).restore_or_initialize() is not None
        found.append(digests(read(trainer)))
        path = path.with_name(f"{path.name}_{seed}")
        there = make_manager(trainer, path)
        there.save()
        there.sync()
    return found


def read_part(strategy: Any, directory: Path) -> dict[str, Any]:
    """Reads only the model of a checkpoint, while the data has grown."""
    (path,) = directory.glob("checkpoint_*")
    trainer = Trainer(strategy, seed=9)
    source = from_arrays(make_digits(50), batch_size=10, shuffle_seed=3)
    data = strategy.distribute_dataset(source, InputOptions(remainder="exact"))
    before = digests(read(trainer))
    report = armillary.Checkpoint(trainer=trainer, data=data).read(
        path, only=["trainer/model", "data"], may_differ="data"
    )
    after = digests(read(trainer))
    return {
        "restored": {name: after[name.partition("/")[2]] for name in report.restored},
        "kept": [after[name] == before[name] for name in after if "model/" not in name],
        "differences": report.differences,
        "epoch": data.get_state()["epoch"],
    }


class Poisoned(armillary.StandardTrainer):
    """A trainer; one process gets a bad value of a parameter in its second step."""

    def __init__(self, strategy: Any) -> None:
        batches = [np.ones(4, np.float32), np.full(4, np.nan, np.float32)]
        options = armillary.StandardTrainerOptions(on_non_finite="raise")
        super().__init__(strategy.distribute_dataset(batches), options)
        self.strategy = strategy
        self.first = nnx.Dict(kernel=nnx.Param(jnp.ones((64, 32))))

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            kernel = self.first["kernel"]
            kernel[...] = kernel[...].at[0, 0].add(jnp.sum(batch))

        self.strategy.run(step_fn, (next(iterator),))


def bad_step(strategy: Any) -> list[Any]:
    """Undoes, on all processes, a step whose bad value one of them has."""
    trainer = Poisoned(strategy)
    text = catch(lambda: trainer.train(2))
    return [text, float(read(trainer)["first/kernel"].sum())]


def mistakes(strategy: Any) -> dict[str, str]:
    """Does what is wrong, or what only one process does."""
    sharded = armillary.ShardedStrategy
    return {
        "sizes": catch(lambda: sharded({"fsdp": 3})),
        "devices": catch(lambda: sharded(devices=["cpu:0", "cpu:1"])),
        "part": catch(lambda: Curious(strategy).train(1)),
        "part in a scope": catch(lambda: read_in_scope(strategy)),
    }


def read_in_scope(strategy: Any) -> None:
    """Reads an array of which each process has a part."""
    trainer = Trainer(strategy)
    trainer.train(1)
    with strategy.scope():
        np.asarray(trainer.model.first.kernel[...])


def count_rows(strategy: Any) -> list[int]:
    """Returns how many of 16 rows this process takes from the data for a batch."""
    data = from_arrays({"x": np.arange(16.0)}, batch_size=16)
    taken: list[int] = []
    read_rows = data.read_rows

    def read_and_count(rows: np.ndarray) -> Any:
        taken.append(len(rows))
        return read_rows(rows)

    data.read_rows = read_and_count
    total = [
        float(strategy.reduce("sum", batch["x"], axis=0))
        for batch in strategy.distribute_dataset(data)
    ]
    assert total == [120.0]
    return taken


def sharded(run_dir: str) -> dict[str, Any]:
    """Does all of this in a job."""
    directory = Path(run_dir)
    strategy = armillary.ShardedStrategy(SHAPE, RULES)
    others = [armillary.MultiWorkerMirroredStrategy(), strategy]
    found = {
        "repr": repr(strategy),
        "train": train(strategy, directory),
        "resume": resume(strategy, directory),
        "own_loop": own_loop(strategy),
        "moved": move(others, directory / "of_one"),
        "part": read_part(strategy, directory / "of_one"),
        "rows": count_rows(strategy),
        "bad": bad_step(strategy),
        "plan": plan(Trainer(strategy), 16, abstract=True).as_json(),
    }
    return found | {"mistakes": mistakes(strategy)}


def read(root: Any) -> dict[str, np.ndarray]:
    """Returns a copy of every array, also of those that are divided."""
    leaves = {path: as_local(leaf) for path, leaf in read_leaves(root).items()}
    return {
        path: np.array(jax.random.key_data(x) if "key" in str(x.dtype) else x)
        for path, x in leaves.items()
    }


def digests(state: dict[str, np.ndarray]) -> dict[str, str]:
    return {
        path: np.ascontiguousarray(value).tobytes().hex()[:2000]
        for path, value in state.items()
    }


def catch(fn: Any) -> str:
    try:
        fn()
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        return "\n".join([f"{type(error).__name__}: {error}", *notes])
    return ""
